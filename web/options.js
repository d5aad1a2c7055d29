// SPDX-License-Identifier: Apache-2.0
// The options field of the compile nodes: one line high until it holds text, and while somebody types the words that
// fit and what is wrong so far. The server knows both; on the canvas and with Vue nodes the field is a textarea.

import { nodesOfGraph } from './badge.js'
import { element } from './elements.js'
import { change } from './server.js'
import { text } from './texts.js'

const PAUSE = 200 // milliseconds without a key before the server is asked
const FOLDED = 44 // pixels, the margins of the field among them
let area = null
let panel = null
let timer
let chosen = 0
let typed = 0

/** Keep the field of a node on the canvas one line high while it is empty. */
export function foldOptions(node) {
  const widget = node.widgets?.find((one) => one.name === 'options')
  if (!widget?.options) return
  const open = () => widget.value || document.activeElement === widget.element
  const usual = widget.options.getMinHeight
  widget.options.getMinHeight = () => (open() ? (usual?.() ?? 60) : FOLDED)
  widget.options.getMaxHeight = () => (open() ? undefined : FOLDED)
  let high = 0
  const grow = () => node.setSize?.([node.size[0], Math.max(high, node.computeSize()[1])])
  // The front end shows no tooltips over text fields on the canvas.
  widget.element?.setAttribute('title', widget.tooltip ?? node.constructor.nodeData?.input?.optional?.options?.[1]?.tooltip ?? '')
  widget.element?.addEventListener('focus', () => {
    high = node.size[1]
    grow()
  })
  widget.element?.addEventListener('blur', grow)
}

/** Help while an options field is typed in, wherever it is shown. */
export function watchOptions() {
  document.addEventListener('input', ({ target }) => {
    if (!isOptions(target)) return
    area = target
    clearTimeout(timer)
    timer = setTimeout(look, PAUSE)
  })
  document.addEventListener('focusout', ({ target }) => target === area && close())
  document.addEventListener('keydown', onKey, true)
}

/** Whether it is the one text field of a compile node. */
function isOptions(target) {
  if (!(target instanceof HTMLTextAreaElement)) return false
  const id = target.closest('[data-node-id]')?.dataset.nodeId
  return nodesOfGraph().some(({ node }) => {
    const widget = node.widgets?.find((one) => one.name === 'options')
    return widget && (widget.element === target || (id !== undefined && String(node.id) === id))
  })
}

async function look() {
  const field = area
  const asked = field.value
  const told = asked.trim() ? await change('options', { text: asked.slice(0, field.selectionEnd) }) : undefined
  if (field !== area || field.value !== asked || document.activeElement !== field) return
  close()
  if (!told || (!told.words.length && !told.problem)) return
  typed = told.typed
  chosen = 0
  const words = told.words.map((word, place) => {
    // A click would take the focus away, and what is focused decides.
    const take = (event) => {
      event.preventDefault()
      complete(word)
    }
    return element('div', { role: 'option', id: `nexfort-word-${place}`, class: 'nexfort-word', 'aria-selected': String(!place), pointerdown: take }, word)
  })
  const list = words.length ? element('div', { role: 'listbox', 'aria-label': text('options.words') }, words) : null
  panel = element('div', { class: 'nexfort-panel nexfort-words' }, list, told.problem ? element('p', { role: 'status' }, told.problem) : null)
  const { left, bottom, width } = field.getBoundingClientRect()
  Object.assign(panel.style, { left: `${left}px`, top: `${bottom + 4}px`, minWidth: `${width}px` })
  document.body.append(panel)
}

function close() {
  panel?.remove()
  panel = null
}

function onKey(event) {
  const words = panel ? [...panel.querySelectorAll('.nexfort-word')] : []
  if (!panel || event.target !== area) return
  if (event.key === 'Escape') close()
  else if (!words.length) return
  else if (event.key === 'Tab' || event.key === 'Enter') complete(words[chosen].textContent)
  else if (event.key === 'ArrowDown' || event.key === 'ArrowUp') {
    chosen = (chosen + (event.key === 'ArrowDown' ? 1 : words.length - 1)) % words.length
    words.forEach((word, place) => word.setAttribute('aria-selected', String(place === chosen)))
  } else return
  event.preventDefault()
  event.stopPropagation()
}

/** Put a word in the place of what was typed of it. */
function complete(word) {
  const end = area.selectionEnd
  area.setRangeText(word, end - typed, end, 'end')
  close()
  area.dispatchEvent(new Event('input', { bubbles: true }))
}
