// SPDX-License-Identifier: Apache-2.0
// The sidebar tab: the compile cache by model, which can be searched and sorted, and what may be done to it. The blocks
// of a model are one click deeper. Above is what the compile nodes of the open workflow do.

import { nodesOfGraph, stateText } from './badge.js'
import { button, dayText, download, element, fileText, momentText, nameText, numberCell, sizeText, table } from './elements.js'
import { meant, settingOf, toast } from './front_end.js'
import { copied } from './help.js'
import { openReport } from './report.js'
import { ask, change } from './server.js'
import { onStatus } from './status.js'
import { language, text } from './texts.js'

export const CACHE_LIMIT = 'Nexfort.Cache.Limit'
const GIB = 2 ** 30
const DEFAULT_LIMIT = 8 // GiB, as the engine's own
const ORDERS = ['last_used', 'size', 'region', 'family', 'state']
const view = { entries: [], limit: 0, place: null, search: '', order: 'last_used', down: true, open: new Set() }
const AT_ONCE = 100 // ids in one request, which may not be long
const PARTS = { NexfortCompileVAE: 'VAE', NexfortCompileControlNet: 'ControlNet' } // of what a file holds besides its model
const ICONS = { pin: 'pi pi-lock-open', unpin: 'pi pi-lock', delete: 'pi pi-trash' }
let panel = null
let unwatch = null

/** The limit that the user set, in bytes; null where the server's own is to hold. */
export function limitBytes() {
  const limit = Number(settingOf(CACHE_LIMIT))
  return limit > 0 ? Math.round(limit * GIB) : null
}

/** Draw the tab into the element that the front end gives, each time it opens. */
export function renderCacheTab(place) {
  if (panel !== null && place.contains(panel)) return
  panel = element('div', { class: 'nexfort-panel nexfort-cache' })
  const total = element('p', { class: 'nexfort-total', role: 'status' })
  const fill = element('div', { class: 'nexfort-fill', 'aria-hidden': 'true' }, element('div', { class: 'nexfort-filled' }))
  const title = element('h2', {}, text('cache.title'))
  const parts = ['overview', 'place', 'scroll'].map((kind) => element('div', { class: `nexfort-${kind}` }))
  panel.append(title, parts[0], tools(), total, fill, parts[1], parts[2])
  place.replaceChildren(panel)
  unwatch?.()
  unwatch = onStatus(drawOverview)
  drawOverview()
  refreshCache()
}

/** The tab is closed. */
export function leaveCacheTab() {
  unwatch?.()
  unwatch = null
  panel?.remove()
  panel = null
}

/** Read the cache again, where it is shown. */
export async function refreshCache() {
  if (panel === null) return
  const told = await ask('cache')
  if (told === undefined || panel === null) return
  view.entries = told.entries
  view.limit = told.limit
  draw()
  view.place = (await change('cache/place', {})) ?? view.place
  if (panel !== null) drawPlace()
}

/** Remove what was used least recently until the rest fits. */
export async function pruneCache(bytes) {
  await removal('cache/prune', { max_bytes: bytes })
}

/** Remove everything that is not pinned, if the user means it. */
export async function clearCache() {
  if (await meant({ title: text('cache.clear'), message: text('cache.clearQuestion') })) await removal('cache/clear', { confirm: true })
}

async function removal(route, ...bodies) {
  const sum = { removed: 0, freed: 0 }
  for (const body of bodies) {
    const told = await change(route, body)
    if (told === undefined) break
    Object.assign(sum, { removed: sum.removed + told.removed, freed: sum.freed + told.freed, count: told.count })
  }
  if (sum.count !== undefined) {
    const said = sum.removed || !sum.count ? 'cache.removed' : 'cache.noneRemoved'
    toast('success', text('cache.title'), text(said, { ...sum, freed: sizeText(sum.freed) }))
  }
  await refreshCache()
}

/** Bodies of requests about these rows. */
function inParts(rows, more = {}) {
  const ids = rows.map((row) => row.id)
  return Array.from({ length: Math.ceil(ids.length / AT_ONCE) }, (_, part) => ({ ids: ids.slice(part * AT_ONCE, (part + 1) * AT_ONCE), ...more }))
}

/** What the compile nodes of the open workflow do; each opens its report. */
function drawOverview() {
  const nodes = nodesOfGraph()
  const lines = nodes.map(({ node, status }) => button(`${node.title}: ${stateText(status)}`, () => openReport(node)))
  panel?.querySelector('.nexfort-overview').replaceChildren(...lines)
}

/** Where the cache lies, with a button that copies it, and why nothing can be kept there. */
function drawPlace() {
  if (view.place === null) return
  const { path, problem } = view.place
  const banner = problem && element('p', { class: 'nexfort-banner', role: 'alert' }, text('report.unsaved', { reason: problem }))
  const copy = async () => toast('info', text('cache.title'), text((await copied(path)) ? 'help.copied' : 'help.notCopied'))
  const line = element('div', { class: 'nexfort-path nexfort-small' }, element('code', {}, path), button(text('cache.copyPath'), copy))
  panel.querySelector('.nexfort-place').replaceChildren(...[banner, line].filter(Boolean))
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
  const limit = settingOf(CACHE_LIMIT) || DEFAULT_LIMIT
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
    const all = [row.region, row.family, row.kind, row.state, row.mode, row.id, ...row.files, ...row.shapes].join(' ').toLowerCase()
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
  const held = view.entries.reduce((sum, row) => sum + row.size, 0)
  const limit = Math.min(view.limit, limitBytes() ?? view.limit) // both are kept to
  const values = { shown: rows.length, count: view.entries.length, size: sizeText(total), limit: sizeText(limit) }
  panel.querySelector('.nexfort-total').textContent = text('cache.total', values)
  panel.querySelector('.nexfort-filled').style.width = `${Math.min(100, (100 * held) / Math.max(limit, 1))}%`
  const place = panel.querySelector('.nexfort-scroll')
  if (!view.entries.length) {
    place.replaceChildren(element('p', {}, text('cache.empty')))
    return
  }
  const focused = document.activeElement?.dataset?.key
  place.replaceChildren(...toldApart(modelsOf(rows).flatMap(filesOf)).map(modelSection))
  if (focused) place.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus() // a redrawn button keeps the keyboard
}

/** The rows by model and mode, in the order of their first rows; by size the largest model first, or last. */
function modelsOf(rows) {
  const found = new Map()
  for (const row of rows) {
    const key = `${row.model} ${row.mode}`
    if (!found.has(key)) found.set(key, { key, rows: [], size: 0, used: '' })
    const model = found.get(key)
    model.rows.push(row)
    model.size += row.size
    if (row.last_used > model.used) model.used = row.last_used
  }
  const models = [...found.values()]
  if (view.order === 'size') models.sort((a, b) => (view.down ? b.size - a.size : a.size - b.size))
  return models
}

/** The same, where a model and a VAE come from one file with what each is, and else with its class. */
function toldApart(models) {
  const named = (model) => `${model.name} ${model.rows[0].mode}`
  const several = (some) => {
    const groups = Object.groupBy(some, named)
    return (model) => groups[named(model)].length > 1
  }
  const isOneOfSeveral = several(models)
  const told = models.map((model) => (isOneOfSeveral(model) ? behind(model, PARTS[model.rows[0].node]) : model))
  const isStill = several(told)
  return told.map((model) => (isStill(model) ? behind(model, model.rows[0].family) : model))
}

function behind(model, what) {
  return what ? { ...model, name: `${model.name} · ${what}` } : model
}

/** A row for each file of a model: checkpoints of one architecture share what is compiled. */
function filesOf(model) {
  const files = [...new Set(model.rows.flatMap((row) => row.files))]
  if (!files.length) return [{ ...model, name: model.rows[0].family, others: [] }]
  return files.map((file) => ({ ...model, key: `${model.key} ${file}`, name: fileText(file), others: files.filter((one) => one !== file).map(fileText) }))
}

function modelSection(model) {
  const { key, rows, name, others } = model
  const own = rows.filter((row) => !row.base)
  const pinned = own.length > 0 && own.every((row) => row.pinned)
  const isOpen = view.open.has(key)
  const toggle = () => {
    if (!view.open.delete(key)) view.open.add(key)
    draw()
  }
  const arrow = element('span', { 'aria-hidden': 'true' }, isOpen ? '▾ ' : '▸ ')
  const head = element('button', { type: 'button', class: 'nexfort-toggle', click: toggle, 'aria-expanded': String(isOpen), 'data-key': `model-${key}` }, arrow, name)
  const pin = icon(pinned ? 'unpin' : 'pin', name, `pin-${key}`, !own.length, () => pinRows(own, !pinned))
  const remove = icon('delete', name, `delete-${key}`, !own.length, () => deleteModel(name, others, own))
  const values = { mode: rows[0].mode || '?', count: rows.length, size: sizeText(model.size), used: dayText(model.used, language()) }
  const parts = [text('cache.model', values), others.length ? text('cache.shared', { names: named(others) }) : '']
  const said = element('div', { class: 'nexfort-small' }, parts.filter(Boolean).join(' · '))
  const bar = element('div', { class: 'nexfort-head' }, head, element('span', { class: 'nexfort-actions' }, pin, remove))
  return element('section', { class: 'nexfort-model', 'data-model': key }, bar, said, isOpen ? blocks(rows) : null)
}

/** Names in a sentence, two of them at most. */
function named(names) {
  return names.length > 2 ? text('cache.andMore', { names: names.slice(0, 2).join(', '), count: names.length - 2 }) : names.join(', ')
}

function blocks(rows) {
  const headings = ['artefact', 'sizeAndUse', 'actions'].map((key) => [text(`cache.${key}`), key === 'sizeAndUse'])
  return table(headings, rows.map(line))
}

function icon(kind, name, key, disabled, click) {
  const said = text(`cache.${kind}`)
  const told = { title: said, 'aria-label': `${said}: ${name}`, 'data-key': key, 'data-pinned': kind === 'delete' ? null : String(kind === 'unpin') }
  return element('button', { type: 'button', class: 'nexfort-icon', disabled, click, ...told }, element('i', { class: ICONS[kind], 'aria-hidden': 'true' }))
}

function line(row) {
  const pin = icon(row.pinned ? 'unpin' : 'pin', row.region, `pin-${row.id}`, row.base, () => pinRows([row], !row.pinned))
  const remove = icon('delete', row.region, `delete-${row.id}`, row.base, () => deleteRow(row))
  const state = ['ready', 'pinned', 'base'].includes(row.state) ? text(`cache.is.${row.state}`) : row.state
  return element(
    'tr',
    { 'data-id': row.id, title: row.shapes.join('\n') || null },
    element('td', {}, nameText(row.region), element('div', { class: 'nexfort-small' }, `${row.family} · ${state}`)),
    numberCell(sizeText(row.size), element('div', { class: 'nexfort-small' }, momentText(row.last_used, language()))),
    element('td', { class: 'nexfort-actions' }, pin, remove)
  )
}

async function pinRows(rows, pinned) {
  for (const body of inParts(rows, { pinned })) if ((await change('cache/pin', body)) === undefined) break
  await refreshCache()
}

async function deleteModel(name, others, rows) {
  const question = others.length ? 'cache.deleteShared' : 'cache.deleteModel'
  if (await meant({ title: text('cache.delete'), message: text(question, { name, names: named(others) }) })) await removal('cache/clear', ...inParts(rows))
}

async function deleteRow(row) {
  if (row.pinned && !(await meant({ title: text('cache.delete'), message: text('cache.deletePinned', { region: row.region }) }))) return
  await removal('cache/clear', { ids: [row.id] })
}

function exportList() {
  const quoted = (value) => {
    // A spreadsheet takes a text that begins so for a formula.
    const plain = String(value).replace(/^([=+\-@\t\r])/, "'$1")
    return `"${plain.replaceAll('"', '""')}"`
  }
  const names = ['id', 'files', 'mode', 'region', 'family', 'kind', 'shapes', 'size', 'created', 'last_used', 'state']
  const lines = shown().map((row) => names.map((name) => quoted(Array.isArray(row[name]) ? row[name].join(' ') : row[name])).join(','))
  download('nexfort-cache.csv', 'text/csv', [names.join(','), ...lines, ''].join('\r\n'))
}
