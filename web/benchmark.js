// SPDX-License-Identifier: Apache-2.0
// "Benchmark this workflow": the open workflow is queued uncompiled and compiled, and a small chart compares the steps.
// Times are those between the events of the sampler that takes the most steps, so loading and decoding do not count.

import { app } from '../../scripts/app.js'
import { api } from '../../scripts/api.js'
import { COMPILE_NODES } from './badge.js'
import { dialogOf, element } from './elements.js'
import { toast } from './server.js'
import { compilesNow, queuesHere, refreshStatus } from './status.js'
import { number, text } from './texts.js'

const SEEDS = ['seed', 'noise_seed']
// The first of a kind loads, compiles or warms up; the second counts. A compiled one comes first: by it the server knows
// whose steps the uncompiled ones are, which it times as well. One comes last, so that badges tell of it.
const RUNS = [
  { enabled: true, counts: false },
  { enabled: false, counts: false },
  { enabled: false, counts: true },
  { enabled: true, counts: true }
]
const ASK_EVERY = 500 // milliseconds
let busy = false

/** Run the workflow both ways and show the result; resolves when the dialog is there. */
export async function benchmarkWorkflow() {
  const { output, workflow } = await app.graphToPrompt()
  if (!Object.values(output).some((node) => COMPILE_NODES.includes(node.class_type))) {
    return toast('info', text('benchmark.title'), text('benchmark.noNode'))
  }
  if (busy) return toast('info', text('benchmark.title'), text('benchmark.busy'))
  busy = true
  queuesHere()
  const dialog = openDialog()
  const seed = Math.floor(Math.random() * 2 ** 31)
  try {
    const found = []
    const runs = [...RUNS]
    for (const [turn, run] of runs.entries()) {
      if (dialog.stopped) return
      dialog.say(text('benchmark.running', { turn: turn + 1, turns: runs.length, way: text(run.enabled ? 'benchmark.ours' : 'benchmark.eager') }))
      const prompt = { output: variant(output, run.enabled, seed + turn), workflow } // by its id badges know their workflow
      const steps = await measure(prompt, dialog)
      // What is compiled in the background is there for the next picture, and would make steps beside it slow.
      if (turn === 0 && (await compiled(dialog))) runs.splice(3, 0, { enabled: true, counts: false })
      if (run.counts) found.push({ ...run, milliseconds: steps })
    }
    dialog.chart(found)
  } catch (error) {
    dialog.say(text('benchmark.failed', { reason: error.message }))
  } finally {
    busy = false
  }
}

/** Wait until nothing is being compiled any more; whether there was anything to wait for. */
async function compiled(dialog) {
  for (let waited = false; ; waited = true) {
    await refreshStatus()
    if (dialog.stopped || !compilesNow()) return waited
    await new Promise((done) => setTimeout(done, ASK_EVERY))
  }
}

/** The prompt with our nodes switched on or off. Each run has seeds of its own, so that nothing of it is cached. */
function variant(output, enabled, seed) {
  const made = structuredClone(output)
  for (const node of Object.values(made)) {
    if (COMPILE_NODES.includes(node.class_type)) Object.assign(node.inputs, { enabled, verify: false })
    for (const name of SEEDS) if (typeof node.inputs[name] === 'number') node.inputs[name] = seed
    if (node.class_type === 'SaveImage') {
      node.class_type = 'PreviewImage' // what is measured is not to fill the output folder
      delete node.inputs.filename_prefix
    }
  }
  return made
}

/** Queue one prompt and wait for its end: milliseconds a step, null where no node told of several steps. */
async function measure(prompt, dialog) {
  const seen = []
  const early = []
  let id = null
  const listeners = new Map()
  const ended = new Promise((resolve, reject) => {
    listeners.set('progress', ({ detail }) => seen.push({ ...detail, at: performance.now() }))
    const end = (finish) => ({ detail }) => (id === null ? early.push([detail, finish]) : detail.prompt_id === id && finish(detail))
    listeners.set('execution_success', end(() => resolve()))
    listeners.set('execution_error', end((detail) => reject(new Error(`${detail.node_type}: ${detail.exception_message}`))))
    listeners.set('execution_interrupted', end(() => reject(new Error(text('benchmark.stopped')))))
    dialog.stop = () => reject(new Error(text('benchmark.stopped')))
  })
  for (const [name, listener] of listeners) api.addEventListener(name, listener)
  try {
    const queued = await api.queuePrompt(0, prompt)
    id = queued.prompt_id
    dialog.running = id
    for (const [detail, finish] of early) if (detail.prompt_id === id) finish(detail)
    await ended
  } finally {
    dialog.running = null
    for (const [name, listener] of listeners) api.removeEventListener(name, listener)
  }
  return perStep(seen.filter((event) => event.prompt_id === id))
}

/** Milliseconds between two steps of the node that told of the most, from progress events; null if none told of two. */
function perStep(events) {
  const lists = Object.values(Object.groupBy(events, (event) => event.node))
  const longest = lists.reduce((best, one) => (one.length > best.length ? one : best), [])
  const [first, last] = [longest.find((event) => event.value > 0), longest.at(-1)]
  if (!first || last.value <= first.value) return null
  return (last.at - first.at) / (last.value - first.value)
}

function openDialog() {
  const said = element('p', { role: 'status' })
  const place = element('div', { class: 'nexfort-dialog-body' }, said)
  const node = dialogOf('benchmark', { heading: text('benchmark.title'), close: text('report.close') }, place)
  const dialog = {
    stopped: false,
    stop: () => {},
    running: null,
    say: (line) => said.replaceChildren(line),
    chart: (found) => place.replaceChildren(chart(found))
  }
  node.addEventListener('close', () => {
    dialog.stopped = true
    dialog.stop()
    if (dialog.running) api.interrupt(dialog.running)
  })
  node.showModal()
  return dialog
}

function chart(found) {
  if (found.some((one) => one.milliseconds === null)) return element('p', {}, text('benchmark.noSteps'))
  const [ours, eager] = [true, false].map((enabled) => found.find((one) => one.enabled === enabled).milliseconds)
  const most = Math.max(ours, eager)
  const rows = [
    ['benchmark.eager', eager],
    ['benchmark.ours', ours]
  ].map(([key, value]) => {
    const bar = element('div', { class: 'nexfort-bar', 'data-key': key })
    bar.style.width = `${(100 * value) / most}%`
    const track = element('div', { class: 'nexfort-track', 'aria-hidden': 'true' }, bar)
    return [element('dt', {}, text(key)), element('dd', {}, track, element('span', {}, `${number(value)} ms`))]
  })
  const result = text('benchmark.result', { ratio: number(eager / ours, 2) })
  return element('figure', { class: 'nexfort-chart' }, element('dl', {}, rows.flat()), element('figcaption', {}, result))
}
