// SPDX-License-Identifier: Apache-2.0
// The result of a benchmark: bars, each run, how far runs are apart, a judgement, and both pictures under a slider. It is
// shown when it was measured and again in the report, and is copied as Markdown.

import { button, element, momentText } from './elements.js'
import { copied } from './help.js'
import { stepTime } from './speed.js'
import { language, number, text } from './texts.js'

export const LEAST_STEPS = 5 // of a run; fewer tell too little

/** A result as the server keeps it. pictures: addresses of the uncompiled one and of ours, if they are still there. */
export function resultSection(result, pictures = null) {
  const eager = kind(result, false)
  const ours = kind(result, true)
  const most = Math.max(eager.mean, ours.mean)
  const rows = [
    ['benchmark.eager', eager],
    ['benchmark.ours', ours]
  ].map(([key, { mean, all, spread }]) => {
    const bar = element('div', { class: 'nexfort-bar', 'data-key': key })
    bar.style.width = `${(100 * mean) / most}%`
    const track = element('div', { class: 'nexfort-track', 'aria-hidden': 'true' }, bar)
    const runs = text('benchmark.runs', { runs: all.map((one) => stepTime(one / 1000)).join(', '), spread: number(100 * spread) })
    return [
      element('dt', {}, text(key)),
      element('dd', {}, track, element('span', { class: 'nexfort-mean' }, stepTime(mean / 1000))),
      element('dd', { class: 'nexfort-small nexfort-runs' }, runs)
    ]
  })
  const { mode, size, steps, device, at } = result
  const facts = `${text('benchmark.facts', { mode, size, steps, device })} · ${momentText(at * 1000, language())}`
  const said = element('p', { role: 'status' })
  const copy = async () => said.replaceChildren(text((await copied(markdown(result))) ? 'help.copied' : 'help.notCopied'))
  return element(
    'figure',
    { class: 'nexfort-chart' },
    element('figcaption', { class: 'nexfort-headline', 'data-verdict': judged(result) }, headline(result)),
    element('p', { class: 'nexfort-small' }, facts),
    element('dl', {}, rows.flat()),
    pictures ? comparison(pictures) : null,
    element('div', { class: 'nexfort-row' }, button(text('benchmark.copy'), copy), said)
  )
}

/** The mean of the runs of a kind, each of them, and how far they are apart as a part of the mean. */
function kind({ runs }, enabled) {
  const all = runs.filter(([compiled]) => compiled === enabled).map(([, milliseconds]) => milliseconds)
  const mean = all.reduce((sum, one) => sum + one, 0) / all.length
  return { all, mean, spread: (Math.max(...all) - Math.min(...all)) / mean }
}

/** "few", "faster", "slower" or "alike": a difference within the spread of the runs says nothing. */
function judged(result) {
  if (result.steps < LEAST_STEPS) return 'few'
  const [eager, ours] = [kind(result, false), kind(result, true)]
  const within = Math.abs(eager.mean - ours.mean) <= Math.max(eager.spread * eager.mean, ours.spread * ours.mean)
  return within ? 'alike' : eager.mean > ours.mean ? 'faster' : 'slower'
}

function headline(result) {
  const [eager, ours] = [kind(result, false).mean, kind(result, true).mean]
  const values = { ratio: number(eager / ours, 2), ours: stepTime(ours / 1000), eager: stepTime(eager / 1000), steps: result.steps }
  return text(`benchmark.${judged(result)}`, values)
}

/** Both pictures on one place; a slider says how much of the uncompiled one is shown. */
function comparison([eager, ours]) {
  const above = element('img', { src: eager, alt: text('benchmark.eager'), class: 'nexfort-above' })
  const place = element('div', { class: 'nexfort-compare' }, element('img', { src: ours, alt: text('benchmark.ours') }), above)
  const slider = element('input', { type: 'range', min: '0', max: '100', value: '50', class: 'nexfort-slider', 'aria-label': text('benchmark.compare') })
  const cut = () => place.style.setProperty('--nexfort-cut', `${100 - slider.valueAsNumber}%`)
  slider.addEventListener('input', cut)
  cut()
  const names = ['benchmark.eager', 'benchmark.ours'].map((key) => element('span', {}, text(key)))
  const made = element('div', { class: 'nexfort-comparison' }, place, slider, element('div', { class: 'nexfort-small nexfort-sides' }, names))
  // A high picture is shown less wide, so that the slider below it is in the window too.
  above.addEventListener('load', () => made.style.setProperty('--nexfort-ratio', above.naturalWidth / above.naturalHeight))
  return made
}

/** For a page or a message of others, in English as the rest of a report is. */
function markdown(result) {
  const { mode, size, steps, device, at, runs } = result
  const lines = runs.map(([compiled, milliseconds]) => `| ${compiled ? 'compiled' : 'uncompiled'} | ${milliseconds.toPrecision(3)} |`)
  const [eager, ours] = [kind(result, false).mean, kind(result, true).mean]
  const verdict = { few: 'too few steps to judge by', alike: 'no difference beyond the spread of the runs' }[judged(result)]
  const facts = `mode ${mode}, ${size}, ${steps} steps a run, ${device}, ${new Date(at * 1000).toISOString().slice(0, 16)}Z`
  return [`Nexfort benchmark: ${verdict ?? `${(eager / ours).toFixed(2)}x`}`, '', facts, '', '| run | ms a step |', '|---|---|', ...lines, ''].join('\n')
}
