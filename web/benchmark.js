// SPDX-License-Identifier: Apache-2.0
// "Benchmark this workflow": after a question the open workflow is queued uncompiled and compiled in turn, and what came
// of it is shown, kept and judged. Times are those between the events of the sampler that takes the most steps, so
// loading and decoding do not count.

import { app } from '../../scripts/app.js'
import { api } from '../../scripts/api.js'
import { COMPILE_NODES, nodesOfGraph } from './badge.js'
import { resultSection } from './benchmark_result.js'
import { dialogOf, element } from './elements.js'
import { meant, toast } from './front_end.js'
import { SEEDS, withPreviews } from './previews.js'
import { change } from './server.js'
import { NO_ID, compilesNow, queuesHere, refreshStatus } from './status.js'
import { duration, text } from './texts.js'

// The first of a kind loads, compiles or warms up; the later ones count, in pairs of one seed. A compiled one comes
// first: by it the server knows whose steps the uncompiled ones are. One comes last, so that badges tell of it.
const RUNS = [
  { enabled: true, seed: 0 },
  { enabled: false, seed: 1 },
  { enabled: false, seed: 2, counts: true },
  { enabled: true, seed: 2, counts: true },
  { enabled: false, seed: 3, counts: true },
  { enabled: true, seed: 3, counts: true }
]
const WARM_AGAIN = { enabled: true, seed: 4 }
const ASK_EVERY = 500 // milliseconds
const MOST_TRIES = 30 // to take a prompt back
// When a tab of this browser that runs a benchmark was heard of last, and for how long that holds: tabs in the
// background are heard of once a minute.
const HEARD = 'Nexfort.Benchmark.Heard'
const HEARD_EVERY = 2000
const HEARD_FOR = 70_000
let busy = false

/** Run the workflow both ways and show the result; resolves when the dialog is there. */
export async function benchmarkWorkflow() {
  const { output, workflow } = await app.graphToPrompt()
  if (!Object.values(output).some((node) => COMPILE_NODES.includes(node.class_type))) {
    return toast('info', text('benchmark.title'), text(nodesOfGraph().length ? 'benchmark.bypassed' : 'benchmark.noNode'))
  }
  if (busy) return toast('info', text('benchmark.title'), text('benchmark.busy'))
  if (Date.now() - Number(localStorage.getItem(HEARD)) < HEARD_FOR) return toast('info', text('benchmark.title'), text('benchmark.elsewhere'))
  busy = true
  try {
    if (!(await wanted(output, workflow))) return
    await heard(() => run(output, workflow))
  } finally {
    busy = false
  }
}

/** Ask, and say how long it takes by the last run of this workflow that came to its end. */
async function wanted(output, workflow) {
  const last = await lastRun(output, workflow.id)
  const values = { runs: RUNS.length, time: last && duration(Math.max(1, Math.round((last * RUNS.length) / 1000))) }
  const message = text(last ? 'benchmark.question' : 'benchmark.questionUnknown', values)
  return meant({ title: text('benchmark.title'), message })
}

/**
 * Milliseconds that the last run of a workflow took, null where none ended well. A run is its own that has its id, or
 * the same nodes: the front end gives a workflow another id when it opens it again, and many from files of the API one.
 */
async function lastRun(output, id) {
  const answer = await api.fetchApi('/history?max_items=32', { cache: 'no-store' }).catch(() => null)
  const told = answer?.ok ? Object.values(await answer.json()) : []
  const nodes = nodesIn(output)
  const isOurs = ({ prompt }) => (id !== NO_ID && prompt[3]?.extra_pnginfo?.workflow?.id === id) || nodesIn(prompt[2]) === nodes
  const ours = told.filter((one) => one.status?.completed && isOurs(one))
  const times = ours.map(({ status }) => {
    const at = (name) => status.messages.find(([kind]) => kind === name)?.[1].timestamp
    return at('execution_success') - at('execution_start')
  })
  return times.filter((time) => time > 0).at(-1) ?? null
}

/** The nodes of a prompt by their ids, whatever their inputs are. */
function nodesIn(prompt) {
  return Object.entries(prompt).map(([id, node]) => `${id} ${node.class_type}`).sort().join('\n')
}

/** Let other tabs know while something goes on. */
async function heard(work) {
  const beat = () => localStorage.setItem(HEARD, String(Date.now()))
  const silent = () => localStorage.removeItem(HEARD)
  const timer = setInterval(beat, HEARD_EVERY)
  window.addEventListener('pagehide', silent)
  beat()
  try {
    await work()
  } finally {
    clearInterval(timer)
    window.removeEventListener('pagehide', silent)
    silent()
  }
}

async function run(output, workflow) {
  queuesHere()
  const dialog = openDialog()
  const seed = Math.floor(Math.random() * 2 ** 31)
  const runs = [...RUNS]
  let done = 0
  try {
    const found = []
    for (const [turn, one] of runs.entries()) {
      if (dialog.stopped) return
      dialog.say(text('benchmark.running', { turn: turn + 1, turns: runs.length, way: text(one.enabled ? 'benchmark.ours' : 'benchmark.eager') }))
      const prompt = { output: variant(output, one.enabled, seed + one.seed), workflow } // by its id badges know their workflow
      const measured = await measure(prompt, dialog)
      done += 1
      // What is compiled in the background is there for the next picture, and would make steps beside it slow.
      if (turn === 0 && (await compiled(dialog, measured.id))) runs.splice(2, 0, WARM_AGAIN)
      if (one.counts) found.push({ ...one, ...measured })
    }
    if (dialog.stopped) return
    await dialog.show(found, output, workflow)
  } catch (error) {
    const said = error.restarted ? text('benchmark.restarted', { done, runs: runs.length }) : text('benchmark.failed', { reason: reasonOf(error) })
    dialog.say(said)
  }
}

/** Why it ended. The error of a prompt that the server refuses says only that: what is wrong the nodes themselves say. */
function reasonOf(error) {
  if (error instanceof TypeError) return text('toast.unreachable', { reason: error.message })
  const { node_errors: nodes, error: refusal } = error.response ?? {}
  const told = Object.values(nodes ?? {}).flatMap((node) => node.errors.map((one) => `${node.class_type}: ${one.details || one.message}`))
  if (told.length) return [...new Set(told)].join('; ')
  return (typeof refusal === 'string' ? refusal : refusal?.details || refusal?.message) || error.message
}

/**
 * Wait until nothing is being compiled any more; whether there was anything to wait for. A server that was started anew
 * meanwhile compiles nothing and does not know the last prompt.
 */
async function compiled(dialog, id) {
  let away = false
  const leaves = () => {
    away = true
    dialog.say(text('benchmark.away'))
  }
  api.addEventListener('reconnecting', leaves)
  try {
    for (let waited = false; ; waited = true) {
      await refreshStatus()
      if (dialog.stopped) return waited
      if (!compilesNow()) {
        if (away && (await stateOf(id)) === 'gone') throw restarted()
        return waited
      }
      await new Promise((done) => setTimeout(done, ASK_EVERY))
    }
  } finally {
    api.removeEventListener('reconnecting', leaves)
  }
}

/** What ends a benchmark whose server was started anew. */
function restarted() {
  return Object.assign(new Error(), { restarted: true })
}

/** The prompt with our nodes switched on or off. Runs that count and belong together have one seed, others their own. */
function variant(output, enabled, seed) {
  const made = withPreviews(output) // what is measured is not to fill the output folder
  for (const node of Object.values(made)) {
    if (COMPILE_NODES.includes(node.class_type)) Object.assign(node.inputs, { enabled, verify: false })
    for (const name of SEEDS) if (typeof node.inputs[name] === 'number') node.inputs[name] = seed
  }
  return made
}

/** Queue one prompt and wait for its end: milliseconds a step, null where no node told of several; steps; picture; id. */
async function measure(prompt, dialog) {
  const seen = []
  const early = []
  let id = null
  let picture = null
  const listeners = new Map()
  const ended = new Promise((resolve, reject) => {
    listeners.set('progress', ({ detail }) => seen.push({ ...detail, at: performance.now() }))
    listeners.set('executed', ({ detail }) => {
      picture ??= detail.output?.images?.find((one) => one.type && /\.(png|jpe?g|webp)$/i.test(one.filename)) ?? null
    })
    const end = (finish) => ({ detail }) => (id === null ? early.push([detail, finish]) : detail.prompt_id === id && finish(detail))
    listeners.set('execution_success', end(() => resolve()))
    listeners.set('execution_error', end((detail) => reject(new Error(`${detail.node_type}: ${detail.exception_message}`))))
    listeners.set('execution_interrupted', end(() => reject(new Error(text('benchmark.stopped')))))
    listeners.set('reconnecting', () => dialog.say(text('benchmark.away')))
    listeners.set('reconnected', async () => {
      const state = await stateOf(id)
      if (state === 'done') resolve()
      else if (state === 'gone') reject(restarted())
    })
    dialog.stop = () => reject(new Error(text('benchmark.stopped')))
  })
  ended.catch(() => {}) // it may be stopped before anybody waits for it
  for (const [name, listener] of listeners) api.addEventListener(name, listener)
  try {
    const queued = await api.queuePrompt(0, prompt)
    id = queued.prompt_id
    dialog.running = id
    if (dialog.stopped) await withdraw(id)
    for (const [detail, finish] of early) if (detail.prompt_id === id) finish(detail)
    await ended
  } finally {
    dialog.running = null
    for (const [name, listener] of listeners) api.removeEventListener(name, listener)
  }
  return { ...perStep(seen.filter((event) => event.prompt_id === id)), picture, id }
}

/** Take a prompt back, whether it waits or runs. One that is about to run takes no notice of the first word. */
async function withdraw(id) {
  await api.deleteItem('queue', id)
  for (let tries = 0; tries < MOST_TRIES && (await stateOf(id)) === 'queued'; tries += 1) {
    await api.interrupt(id)
    await new Promise((done) => setTimeout(done, ASK_EVERY))
  }
}

/** What a server that was away knows of a prompt: "done", "queued", or "gone" where it was started anew. */
async function stateOf(id) {
  const ask = async (route) => (await api.fetchApi(route, { cache: 'no-store' })).json()
  try {
    if (id in (await ask(`/history/${id}`))) return 'done'
    const queue = await ask('/queue')
    return [...queue.queue_running, ...queue.queue_pending].some((item) => item[1] === id) ? 'queued' : 'gone'
  } catch {
    return 'queued' // it is away again
  }
}

/** Milliseconds between two steps of the node that told of the most, and its steps; null if none told of two. */
function perStep(events) {
  const lists = Object.values(Object.groupBy(events, (event) => event.node))
  const longest = lists.reduce((best, one) => (one.length > best.length ? one : best), [])
  const [first, last] = [longest.find((event) => event.value > 0), longest.at(-1)]
  if (!first || last.value <= first.value) return { milliseconds: null, steps: last?.value ?? 0 }
  return { milliseconds: (last.at - first.at) / (last.value - first.value), steps: last.value }
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
    show: async (found, output, workflow) => place.replaceChildren(await outcome(found, output, workflow))
  }
  node.addEventListener('close', () => {
    dialog.stopped = true
    dialog.stop()
    if (dialog.running) withdraw(dialog.running)
  })
  node.showModal()
  return dialog
}

/** What came of it, as the server keeps it. */
async function outcome(found, output, workflow) {
  if (found.some((one) => one.milliseconds === null)) return element('p', {}, text('benchmark.noSteps'))
  const [eager, ours] = [false, true].map((enabled) => found.findLast((one) => one.enabled === enabled).picture)
  const pictures = eager && ours ? [eager, ours].map(addressOf) : null
  const nodes = Object.values(output)
  const modes = nodes.filter((node) => COMPILE_NODES.includes(node.class_type)).map((node) => node.inputs.mode)
  const result = {
    workflow: workflow.id || null,
    mode: [...new Set(modes)].join(', ').slice(0, 120),
    size: pictures ? await sizeOf(pictures[0]) : sizeIn(nodes),
    steps: found[0].steps,
    runs: found.map((one) => [one.enabled, one.milliseconds])
  }
  const told = await change('benchmark', result)
  const shown = told?.benchmark ?? { ...result, device: '?', at: Date.now() / 1000 }
  const parts = told?.kept ? [] : [element('p', {}, text('benchmark.notKept'))]
  return element('div', {}, resultSection(shown, pictures), ...parts)
}

function addressOf({ filename, subfolder, type }) {
  return api.apiURL(`/view?${new URLSearchParams({ filename, subfolder: subfolder ?? '', type })}`)
}

async function sizeOf(address) {
  const picture = new Image()
  picture.src = address
  await picture.decode().catch(() => {})
  return picture.naturalWidth ? `${picture.naturalWidth}×${picture.naturalHeight}` : '?'
}

/** The size that a node of the workflow sets. */
function sizeIn(nodes) {
  const found = nodes.find(({ inputs }) => typeof inputs.width === 'number' && typeof inputs.height === 'number')
  return found ? `${found.inputs.width}×${found.inputs.height}` : '?'
}
