// SPDX-License-Identifier: Apache-2.0
// The sidebar tab: the compile cache as a table that can be searched and sorted, and what may be done to it.

import { app } from '../../scripts/app.js'
import { button, download, element, momentText, nameText, numberCell, sizeText, table } from './elements.js'
import { ask, change, toast } from './server.js'
import { language, text } from './texts.js'

export const CACHE_LIMIT = 'Nexfort.Cache.Limit'
export const GIB = 2 ** 30
const DEFAULT_LIMIT = 8 // GiB, as the engine's own
const ORDERS = ['last_used', 'size', 'region', 'family', 'state']
const view = { entries: [], search: '', order: 'last_used', down: true }
let panel = null

/** Draw the tab into the element that the front end gives, each time it opens. */
export function renderCacheTab(place) {
  if (panel !== null && place.contains(panel)) return
  panel = element('div', { class: 'nexfort-panel nexfort-cache' })
  const total = element('p', { class: 'nexfort-total', role: 'status' })
  panel.append(element('h2', {}, text('cache.title')), tools(), total, element('div', { class: 'nexfort-scroll' }))
  place.replaceChildren(panel)
  refreshCache()
}

/** The tab is closed. */
export function leaveCacheTab() {
  panel?.remove()
  panel = null
}

/** Read the cache again, where it is shown. */
export async function refreshCache() {
  if (panel === null) return
  const told = await ask('cache')
  if (told === undefined || panel === null) return
  view.entries = told.entries
  draw()
}

/** Remove what was used least recently until the rest fits. */
export async function pruneCache(bytes) {
  await removal('cache/prune', { max_bytes: bytes })
}

/** Remove everything that is not pinned, if the user means it. */
export async function clearCache() {
  if (await meant('cache.clear', 'cache.clearQuestion')) await removal('cache/clear', { confirm: true })
}

async function removal(route, body) {
  const told = await change(route, body)
  if (told !== undefined) {
    const values = { removed: told.removed, freed: sizeText(told.freed), count: told.count }
    toast('success', text('cache.title'), text('cache.removed', values))
  }
  await refreshCache()
}

async function meant(title, question, values) {
  return app.extensionManager.dialog.confirm({ title: text(title), message: text(question, values) })
}

function tools() {
  const search = element('input', {
    type: 'search',
    class: 'nexfort-input',
    placeholder: text('cache.search'),
    'aria-label': text('cache.search'),
    value: view.search
  })
  search.addEventListener('input', () => {
    view.search = search.value
    draw()
  })
  const actions = [['cache.refresh', refreshCache], ['cache.export', exportList], ['cache.clear', clearCache]]
  const buttons = actions.map(([key, click]) => button(text(key), click))
  return element(
    'div',
    { class: 'nexfort-tools' },
    search,
    element('div', { class: 'nexfort-row' }, ...sorting()),
    element('div', { class: 'nexfort-row' }, ...pruning()),
    element('div', { class: 'nexfort-row' }, buttons)
  )
}

function sorting() {
  const options = ORDERS.map((name) => element('option', { value: name, selected: name === view.order }, text(`cache.${name}`)))
  const select = element('select', { class: 'nexfort-input' }, options)
  const direction = element('button', { type: 'button', class: 'nexfort-icon', title: text('cache.reverse') })
  const point = () => direction.replaceChildren(element('span', { 'aria-hidden': 'true' }, view.down ? '▼' : '▲'))
  direction.setAttribute('aria-label', text('cache.reverse'))
  direction.addEventListener('click', () => {
    view.down = !view.down
    point()
    draw()
  })
  select.addEventListener('change', () => {
    view.order = select.value
    view.down = view.order === 'size' || view.order === 'last_used'
    point()
    draw()
  })
  point()
  return [element('label', { class: 'nexfort-label' }, `${text('cache.sortBy')} `, select), direction]
}

function pruning() {
  const limit = app.extensionManager.setting.get(CACHE_LIMIT) || DEFAULT_LIMIT
  const size = element('input', {
    type: 'number',
    class: 'nexfort-input nexfort-size',
    min: '0',
    step: 'any',
    value: String(limit)
  })
  const prune = () => {
    const amount = size.valueAsNumber
    if (amount >= 0) pruneCache(Math.round(amount * GIB))
    else toast('warn', text('cache.prune'), text('cache.sizeWanted'))
  }
  return [element('label', { class: 'nexfort-label' }, `${text('cache.keepAtMost')} `, size), button(text('cache.prune'), prune)]
}

function shown() {
  const words = view.search.toLowerCase().split(/\s+/).filter(Boolean)
  const fits = (row) => {
    const all = [row.region, row.family, row.kind, row.state, row.id, ...row.shapes].join(' ').toLowerCase()
    return words.every((word) => all.includes(word))
  }
  const by = view.order
  const order = (a, b) => (a[by] < b[by] ? -1 : a[by] > b[by] ? 1 : a.id < b.id ? -1 : 1)
  const rows = view.entries.filter(fits).sort(order)
  return view.down ? rows.reverse() : rows
}

function draw() {
  const rows = shown()
  const total = rows.reduce((sum, row) => sum + row.size, 0)
  const values = { shown: rows.length, count: view.entries.length, size: sizeText(total) }
  panel.querySelector('.nexfort-total').textContent = text('cache.total', values)
  const place = panel.querySelector('.nexfort-scroll')
  if (!view.entries.length) {
    place.replaceChildren(element('p', {}, text('cache.empty')))
    return
  }
  const focused = document.activeElement?.dataset?.key
  const headings = ['artefact', 'sizeAndUse', 'actions'].map((key) => [text(`cache.${key}`), key === 'sizeAndUse'])
  place.replaceChildren(table(headings, rows.map(line)))
  if (focused) place.querySelector(`[data-key="${focused}"]`)?.focus()  // a redrawn button keeps the keyboard
}

function line(row) {
  const action = (key, kind, click) => {
    const told = { title: text(key), 'aria-label': `${text(key)}: ${row.region}`, 'data-key': `${kind}-${row.id}` }
    return element('button', { type: 'button', class: 'nexfort-icon', disabled: row.base, click, ...told })
  }
  const pin = action(row.pinned ? 'cache.unpin' : 'cache.pin', 'pin', () => pinRow(row))
  pin.setAttribute('data-pinned', String(row.pinned))
  pin.append(element('i', { class: row.pinned ? 'pi pi-lock' : 'pi pi-lock-open', 'aria-hidden': 'true' }))
  const remove = action('cache.delete', 'delete', () => deleteRow(row))
  remove.append(element('i', { class: 'pi pi-trash', 'aria-hidden': 'true' }))
  const state = ['ready', 'pinned', 'base'].includes(row.state) ? text(`cache.is.${row.state}`) : row.state
  return element(
    'tr',
    { 'data-id': row.id, title: row.shapes.join('\n') || null },
    element('td', {}, nameText(row.region), element('div', { class: 'nexfort-small' }, `${row.family} · ${state}`)),
    numberCell(sizeText(row.size), element('div', { class: 'nexfort-small' }, momentText(row.last_used, language()))),
    element('td', { class: 'nexfort-actions' }, pin, remove)
  )
}

async function pinRow(row) {
  await change('cache/pin', { ids: [row.id], pinned: !row.pinned })
  await refreshCache()
}

async function deleteRow(row) {
  if (row.pinned && !(await meant('cache.delete', 'cache.deletePinned', { region: row.region }))) return
  await removal('cache/clear', { ids: [row.id] })
}

function exportList() {
  const quoted = (value) => {
    // A spreadsheet takes a text that begins so for a formula.
    const plain = String(value).replace(/^([=+\-@\t\r])/, "'$1")
    return `"${plain.replaceAll('"', '""')}"`
  }
  const names = ['id', 'region', 'family', 'kind', 'shapes', 'size', 'created', 'last_used', 'state']
  const lines = shown().map((row) => names.map((name) => quoted(name === 'shapes' ? row.shapes.join(' ') : row[name])).join(','))
  download('nexfort-cache.csv', 'text/csv', [names.join(','), ...lines, ''].join('\r\n'))
}
