// SPDX-License-Identifier: Apache-2.0
// The report panel: what the engine did for one node, or for all of them. It shows what GET /nexfort/report tells.

import { element, momentText, sizeText } from './elements.js'
import { ask, change, toast } from './server.js'
import { idsOf, isKnown, onStatus } from './status.js'
import { language, text } from './texts.js'

let open = null

/** Open the report of a node, or of everything that is alive without one. */
export async function openReport(node = null) {
  open?.close()
  const body = element('div', { class: 'nexfort-report-body', tabindex: '0', role: 'region', 'aria-label': text('report.title') })
  const close = element('button', { type: 'button', class: 'nexfort-button', click: () => dialog.close() }, text('report.close'))
  const heading = element('h2', { id: 'nexfort-report-title' }, node ? `${text('report.title')}: ${node.title}` : text('report.title'))
  const verify = element('button', { type: 'button', class: 'nexfort-button', title: text('verify.what'), click: async () => said.replaceChildren(await askToVerify(node)) }, text('verify.next'))
  const said = element('p', { class: 'nexfort-said', role: 'status' })
  const dialog = element('dialog', { class: 'nexfort-panel nexfort-report', 'aria-labelledby': 'nexfort-report-title' })
  dialog.append(element('header', {}, heading, element('div', { class: 'nexfort-row' }, verify, close)), said, body)
  let due = null
  const fill = () => {
    // Events come once a second while something compiles; one question at a time is enough.
    due ??= show(body, node).finally(() => {
      due = null
    })
    return due
  }
  const ended = onStatus(fill)
  dialog.addEventListener('close', () => {
    ended()
    dialog.remove()
    if (open === dialog) open = null
  })
  open = dialog
  document.body.append(dialog)
  await fill()
  if (dialog.isConnected && !dialog.open) dialog.showModal()
}

/** Have the next step of every model that is alive compared with eager. */
export async function verifyNext() {
  toast('info', text('verify.next'), await askToVerify(null))
}

async function askToVerify(node) {
  const ids = node && idsOf(node).filter(isKnown)
  if (ids?.length === 0) return text('verify.nothing')
  const told = await change('verify', ids ? { nodes: ids } : {})
  return text(told?.nodes.length ? 'verify.due' : 'verify.nothing')
}

async function show(body, node) {
  const told = await ask('report')
  if (told?.engines === undefined) return
  const ids = node ? idsOf(node) : null
  const engines = told.engines.filter((engine) => ids === null || engine.nodes.some((id) => ids.includes(id)))
  const parts = engines.map((engine) => engineSection(engine, told))
  body.replaceChildren(...(parts.length ? parts : [element('p', {}, text('report.nothing'))]))
}

function engineSection({ name, report }, { cache, memory }) {
  const section = element('section', {}, element('h3', {}, name))
  section.append(facts(report, cache, memory))
  const verified = report.verifications.at(-1)
  if (verified) section.append(verification(verified))
  section.append(list('report.eager', report.eager.map((row) => `${row.region}: ${row.reason}`)))
  section.append(list('report.variants', report.variants.map((row) => `${row.region}: ${row.reason}`)))
  section.append(list('report.precision', report.precision.map(precisionLine)))
  section.append(list('report.inactive', report.inactive.map((row) => `${row.token}: ${row.reason}`)))
  section.append(list('report.notes', report.notes))
  if (report.artefacts.length) section.append(artefacts(report.artefacts))
  return section
}

function facts(report, cache, memory) {
  const kinds = new Set(report.regions.map((row) => row.kind)).size
  const rows = [
    ['report.mode', report.config.mode ?? ''],
    ['report.regions', text('report.regionsValue', { regions: report.regions.length, kinds })],
    ['report.loaded', text('report.artefactsIn', { count: report.artefacts_loaded, seconds: number(report.seconds_warm) })],
    ['report.compiled', text('report.artefactsIn', { count: report.artefacts_compiled, seconds: number(report.seconds_cold) })],
    ['report.calls', text('report.callsValue', { calls: report.calls, seconds: number(report.seconds_calls) })],
    ['report.memory', text('report.memoryValue', { used: sizeText(memory.used), total: sizeText(memory.total), device: memory.device })],
    ['report.place', text(cache === 'chosen' ? 'report.placeChosen' : 'report.placeUser')]
  ]
  return element('dl', {}, rows.map(([key, value]) => [element('dt', {}, text(key)), element('dd', {}, value)]).flat())
}

function list(key, lines) {
  if (!lines.length) return ''
  const items = lines.map((line) => element('li', {}, line))
  return element('details', { open: true }, element('summary', {}, `${text(key)} (${lines.length})`), element('ul', {}, items))
}

function artefacts(rows) {
  const headings = ['report.region', 'report.source', 'report.seconds'].map((key) =>
    element('th', { scope: 'col', class: key === 'report.seconds' && 'nexfort-number' }, text(key))
  )
  const lines = rows.map((row) =>
    element(
      'tr',
      {},
      element('td', {}, row.region),
      element('td', {}, text(`report.${row.source}`)),
      element('td', { class: 'nexfort-number' }, number(row.seconds))
    )
  )
  const table = element('table', {}, element('thead', {}, element('tr', {}, headings)), element('tbody', {}, lines))
  return element('details', {}, element('summary', {}, `${text('report.artefacts')} (${rows.length})`), table)
}

function precisionLine({ region, products }) {
  const count = (rows) => rows.reduce((sum, row) => sum + row.count, 0)
  const kept = products.filter((row) => row.reason !== null)
  const narrow = text('report.precisionValue', { region, fp8: count(products) - count(kept), count: count(products) })
  return kept.length ? `${narrow} (${[...new Set(kept.map((row) => row.reason))].join('; ')})` : narrow
}

function verification(told) {
  const ratio = number(told.eager_ms / told.compiled_ms, 2)
  const said = text('verify.said', { ours: number(told.compiled_ms), eager: number(told.eager_ms), ratio, distance: small(told.distance) })
  const numbers = ['verify.eager', 'verify.ours', 'verify.distance']
  const headings = ['report.region', ...numbers, 'verify.judgement'].map((key) =>
    element('th', { scope: 'col', class: numbers.includes(key) && 'nexfort-number' }, text(key))
  )
  const lines = told.regions.map((row) =>
    element(
      'tr',
      {},
      element('td', {}, row.region),
      element('td', { class: 'nexfort-number' }, number(row.eager_ms, 2)),
      element('td', { class: 'nexfort-number' }, number(row.compiled_ms, 2)),
      element('td', { class: 'nexfort-number' }, small(row.distance)),
      element('td', { title: judgedBy(row) }, text(row.over ? 'verify.over' : row.unjudged ? 'verify.unjudged' : 'verify.equal'))
    )
  )
  const table = element('table', {}, element('thead', {}, element('tr', {}, headings)), element('tbody', {}, lines))
  const where = element('p', { class: 'nexfort-small' }, `${told.device}, torch ${told.torch}, ${momentText(told.at, language())}`)
  const over = told.regions.some((row) => row.over)
  return element('details', { open: true, class: 'nexfort-verified' }, element('summary', {}, text('verify.title')), element('p', {}, said), where, element('details', { open: over }, element('summary', {}, `${text('report.regions')} (${lines.length})`), table))
}

function judgedBy(row) {
  if (row.unjudged) return row.unjudged
  return row.error === null ? '' : text('verify.errors', { ours: small(row.error), eager: small(row.eager_error) })
}

function small(value) {
  if (value === null) return '∞'
  return value === 0 ? '0' : value.toExponential(1)
}

function number(value, digits = 1) {
  return value.toLocaleString(language(), { minimumFractionDigits: digits, maximumFractionDigits: digits })
}
