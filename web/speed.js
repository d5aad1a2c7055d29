// SPDX-License-Identifier: Apache-2.0
// How much faster, in the user's words: rows on kinds of steps as GET /nexfort/report tells them under "speed".

import { element } from './elements.js'
import { duration, language, number, text } from './texts.js'

const ALIKE = 0.03 // nearer to 1 than this a ratio says neither faster nor slower
const DAY = 86400
// The node whose steps a bypassed run and a benchmark compare.
export const MODEL_NODE = 'NexfortCompileModel'

/** "faster", "slower", "alike" or "unmeasured", of a ratio or null. */
export function verdict(ratio) {
  if (ratio === null || ratio === undefined) return 'unmeasured'
  return ratio > 1 + ALIKE ? 'faster' : ratio < 1 - ALIKE ? 'slower' : 'alike'
}

/** A ratio with as many digits as say something: two near 1, where one would hide most of it. */
export function times(ratio) {
  return number(ratio, ratio > 0.8 && ratio < 1.2 ? 2 : 1)
}

/** The key of the text on how to have steps compared, of an engine that these kinds of nodes made. */
export function howToCompare(kinds) {
  return kinds.length && !kinds.includes(MODEL_NODE) ? 'speed.howVerify' : 'speed.how'
}

/**
 * The first lines of a report: how much faster it is now, what that saved, and a chart of the last pictures. kinds: of
 * the nodes that made the engine.
 */
export function speedSection(rows, kinds) {
  const row = (rows ?? []).at(-1)
  const ratio = row?.compiled && row.eager ? row.eager / row.compiled : null
  const said = verdict(ratio)
  const parts = [element('p', { class: 'nexfort-headline', 'data-verdict': said }, headline(row, ratio, said))]
  if (said === 'unmeasured') parts.push(element('p', { class: 'nexfort-small' }, text(howToCompare(kinds))))
  else if (said === 'slower') parts.push(element('p', {}, row.reason), element('p', {}, text('speed.try')))
  const besides = row ? gains(row) : []
  if (besides.length) parts.push(element('p', { class: 'nexfort-small' }, besides.join(' · ')))
  if (row?.recent.length > 1) parts.push(history(row.recent))
  return parts
}

function headline(row, ratio, said) {
  if (said === 'unmeasured') return row?.compiled ? text('speed.unmeasuredAt', { ours: stepTime(row.compiled) }) : text('speed.unmeasured')
  const values = { ratio: number(ratio, 2), ours: stepTime(row.compiled), eager: stepTime(row.eager) }
  return text(`speed.${said}`, { ...values, source: text(`speed.source.${row.source}`), when: moment(row.eager_at) })
}

function gains(row) {
  const found = []
  if (row.saved >= 1 && row.pictures) found.push(text('speed.saved', { time: duration(Math.round(row.saved)), count: row.pictures }))
  if (row.made >= 1) found.push(text('speed.made', { time: duration(Math.round(row.made)) }))
  return found
}

/** A bar for each of the last pictures, as high as its steps were long. */
function history(recent) {
  const most = Math.max(...recent.map(([, seconds]) => seconds))
  const bars = recent.map(([at, seconds]) => {
    const bar = element('span', { class: 'nexfort-picture', title: `${moment(at)}: ${stepTime(seconds)}` })
    bar.style.height = `${(100 * seconds) / most}%`
    return bar
  })
  const label = text('speed.history')
  const shown = element('div', { class: 'nexfort-pictures', role: 'img', 'aria-label': label }, bars)
  return element('figure', { class: 'nexfort-history' }, shown, element('figcaption', { class: 'nexfort-small' }, label))
}

/** Seconds of one step with three digits, in milliseconds where they are few. */
export function stepTime(seconds) {
  const [value, unit] = seconds < 0.1 ? [seconds * 1000, 'millisecond'] : [seconds, 'second']
  return value.toLocaleString(language(), { style: 'unit', unit, unitDisplay: 'short', maximumSignificantDigits: 3, minimumSignificantDigits: 2 })
}

/** The time of a moment of the last day, the date of an earlier one. */
function moment(seconds) {
  const style = Date.now() / 1000 - seconds < DAY ? { timeStyle: 'short' } : { dateStyle: 'medium' }
  return new Date(seconds * 1000).toLocaleString(language(), style)
}
