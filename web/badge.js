// SPDX-License-Identifier: Apache-2.0
// The badge on a compile node: one button that says what became of it and opens its report. It is a DOM widget, which
// the classic canvas and Vue nodes both show, and is saved in no workflow.

import { element } from './elements.js'
import { openReport } from './report.js'
import { MODEL_NODE, howToCompare, stepTime, times, verdict } from './speed.js'
import { onStatus, statusOf } from './status.js'
import { duration, text } from './texts.js'

export const COMPILE_NODES = [MODEL_NODE, 'NexfortCompileVAE', 'NexfortCompileControlNet']
const HEIGHT = 36
// The modes of the front end's nodes in which they do not run.
const SKIPPED = { 2: 'bypassed', 4: 'bypassed' }
const MODE_EVERY = 200 // milliseconds
// States in which steps run compiled, so that their speed is said.
const RUNS = ['warm', 'compiled']
const badges = new Map()
let visible = true

/** Put the badge on a new compile node. */
export function addBadge(node) {
  const dot = element('span', { class: 'nexfort-dot', 'aria-hidden': 'true' })
  const state = element('span', { class: 'nexfort-state' })
  const button = element('button', { type: 'button', class: 'nexfort-badge', click: () => openReport(node) }, dot, state)
  const height = () => HEIGHT
  const options = { serialize: false, hideOnZoom: false, margin: 6, getMinHeight: height, getMaxHeight: height }
  const widget = node.addDOMWidget('nexfort_status', 'nexfort_status', button, options)
  widget.serialize = false
  widget.label = ' '
  badges.set(node, { button, state, widget })
  let placed = false
  const added = node.onAdded
  node.onAdded = function (...rest) {
    placed = true
    return added?.apply(this, rest)
  }
  const removed = node.onRemoved
  node.onRemoved = function (...rest) {
    badges.delete(node)
    return removed?.apply(this, rest)
  }
  draw(node)
  // A node has its id, by which its state is known, only after it was created.
  setTimeout(() => {
    if (!badges.has(node)) return
    // The front end (1.49) puts a node in a missing one's place without telling it so: its DOM widgets, the badge among
    // them, would not be shown until the workflow is loaded anew.
    if (node.graph && !placed) node.onAdded?.(node.graph)
    draw(node)
  })
  node.setSize?.([node.size[0], Math.max(node.size[1], node.computeSize()[1])])
}

/** The compile nodes that are shown, each with what its badge tells of. */
export function nodesOfGraph() {
  return [...badges.keys()].map((node) => ({ node, status: shownStatus(node) }))
}

function shownStatus(node) {
  const skipped = SKIPPED[node.mode]
  const status = skipped ? { state: skipped, eager: 0 } : statusOf(node)
  return { ...status, kind: node.comfyClass }
}

/** Say anew what every badge says: something changed, or the language did. */
export function drawBadges() {
  for (const node of badges.keys()) draw(node)
}

/** Show badges, or hide them. */
export function showBadges(yes) {
  visible = yes !== false
  drawBadges()
}

/** Keep the badges true. */
export function watchBadges() {
  onStatus(drawBadges)
  // No event tells that a node is bypassed, or no longer is.
  setInterval(() => {
    for (const [node, badge] of badges) if (node.mode !== badge.mode) draw(node)
  }, MODE_EVERY)
}

/** What a badge says of a state. */
export function stateText(status) {
  const left = status.seconds_left ?? null
  const values = { done: status.done, total: status.total, left: left !== null && duration(Math.max(1, left)) }
  let said = withSpeed(status, text(keyOf(status), values))
  if (status.eager) said = text('badge.someEager', { said, count: status.eager })
  return status.unsaved ? text('badge.unsaved', { said }) : said
}

function keyOf({ state, total, fresh, seconds_left: left }) {
  const isKnown = (left ?? null) !== null // it may round to 0
  if (state === 'background' && total) return isKnown ? 'badge.backgroundLeft' : 'badge.backgroundAt'
  if (state === 'compiled' && !fresh) return 'badge.compiledBefore'
  return state === 'compiling' && isKnown ? 'badge.compilingLeft' : `badge.${state}`
}

/**
 * A state with how much faster its steps are. Steps of a model are compared sooner or later, for which running it
 * bypassed is enough. Those of other networks are not, if nobody verifies one: their own time is told.
 */
function withSpeed(status, said) {
  if (!RUNS.includes(status.state)) return said
  const found = verdict(status.speed?.ratio)
  if (found === 'unmeasured') {
    if (status.slower) return text('badge.slower', { said })
    if (status.kind === MODEL_NODE) return text('badge.unmeasured', { said })
    return status.speed?.seconds ? text('badge.taken', { said, time: stepTime(status.speed.seconds) }) : said
  }
  return text(`badge.${found === 'slower' ? 'slowerHere' : found}`, { ratio: times(status.speed.ratio), said })
}

/** Which of the badge's colours a state has: what wants a look is amber. */
function colourOf(status) {
  if (['compiling', 'background'].includes(status.state)) return status.state
  return status.eager || isSlower(status) || status.unsaved ? 'eager' : status.state
}

function isSlower(status) {
  return status.slower || (RUNS.includes(status.state) && verdict(status.speed?.ratio) === 'slower')
}

/** What is said where the pointer rests: why it is slower and what to try, or how to compare, and what a click does. */
function titleOf(status) {
  const click = text(['compiling', 'background'].includes(status.state) ? 'badge.once' : 'badge.open')
  const unmeasured = RUNS.includes(status.state) && !status.slower && verdict(status.speed?.ratio) === 'unmeasured'
  return [status.speed?.reason, isSlower(status) && text('speed.try'), unmeasured && text(howToCompare([status.kind])), click].filter(Boolean).join('\n')
}

function draw(node) {
  const badge = badges.get(node)
  const { button, state, widget } = badge
  const status = shownStatus(node)
  badge.mode = node.mode
  const said = stateText(status)
  const colour = colourOf(status)
  const done = status.total ? `${(100 * status.done) / status.total}%` : '0%'
  const title = titleOf(status)
  const label = text('badge.label', { said })
  const shown = [colour, done, said, title, label].join('\n')
  // The server tells several times a second how far it is: what stays is not set again, so that the dot's animation
  // goes on and nothing is laid out anew.
  if (badge.shown !== shown) {
    badge.shown = shown
    button.dataset.state = colour
    button.style.setProperty('--nexfort-done', done)
    state.textContent = state.title = said
    button.title = title
    button.setAttribute('aria-label', label)
  }
  if (Boolean(widget.hidden) === visible) {
    widget.hidden = !visible
    widget.options.hidden = !visible
    node.setDirtyCanvas?.(true, true)
  }
}
