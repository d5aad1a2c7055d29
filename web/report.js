// SPDX-License-Identifier: Apache-2.0
// The report panel: what the engine did for one node, or for all of them. It shows what GET /nexfort/report tells.

import { app } from '../../scripts/app.js'
import { nodesOfGraph } from './badge.js'
import { resultSection } from './benchmark_result.js'
import { button, dialogOf, element, fileText, momentText, numberCell, sizeText, table } from './elements.js'
import { toast } from './front_end.js'
import { copyReport, openPage, reportProblem } from './help.js'
import { ask, change } from './server.js'
import { speedSection } from './speed.js'
import { NO_ID, onStatus, toldOf } from './status.js'
import { language, number, text } from './texts.js'

let open = null

/** Open the report of a node, or of everything that is alive without one. */
export async function openReport(node = null) {
  open?.close()
  const title = text('report.title')
  const body = element('div', { class: 'nexfort-dialog-body', tabindex: '0', role: 'region', 'aria-label': title })
  const said = element('p', { class: 'nexfort-said', role: 'status' })
  const verify = async () => said.replaceChildren(await askToVerify(node))
  const header = {
    heading: node ? text('report.titleOf', { name: node.title }) : title,
    close: text('report.close'),
    tools: [
      button(text('verify.next'), verify, { title: text('verify.what') }),
      button(text('help.copy'), async () => said.replaceChildren(await copyReport()), { title: text('help.what') }),
      button(text('help.problem'), reportProblem, { title: text('help.problemWhat') }),
      button('?', openPage, { title: text('help.page'), 'aria-label': text('help.page') })
    ]
  }
  const dialog = dialogOf('report', header, said, body)
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
    if (open === dialog) open = null
  })
  open = dialog
  await fill()
  if (dialog.isConnected && !dialog.open) dialog.showModal()
}

/** Have the next step of every model that is alive compared with eager. */
export async function verifyNext() {
  toast('info', text('verify.next'), await askToVerify(null))
}

async function askToVerify(node) {
  const known = node && toldOf(node)
  if (known?.length === 0) return nothing('verify.nothing')
  const told = await change('verify', known ? { nodes: known.map(({ id }) => id), workflow: known[0].workflow } : {})
  return told?.nodes.length ? text('verify.due') : nothing('verify.nothing')
}

/** Why there is nothing: the workflow has no node that could compile, or what this key says. */
function nothing(key) {
  return text(nodesOfGraph().length ? key : 'benchmark.noNode')
}

async function show(body, node) {
  const told = await ask('report')
  if (told?.engines === undefined) return
  const known = node && toldOf(node)
  const isOf = ({ nodes }) => nodes.some((one) => known.some(({ id, workflow }) => one.id === id && one.workflow === workflow))
  const engines = node ? told.engines.filter(isOf) : told.engines
  const problem = engines.some(({ report }) => report.unsaved) ? await whyUnsaved() : null
  const opened = body.querySelector('.nexfort-details[open]') !== null // events come while somebody reads
  const parts = engines.map((engine) => engineSection(engine, told, problem))
  for (const part of parts) part.querySelector('.nexfort-details').open = opened
  if (!parts.length) parts.push(element('p', {}, nothing('report.nothing')))
  body.replaceChildren(...parts, ...benchmarked(told))
}

/** The last benchmark of the open workflow, or why earlier ones are not there any more. */
function benchmarked({ benchmarks, lost }) {
  const ids = [(app.rootGraph ?? app.graph).id, NO_ID, '']
  const kept = benchmarks.findLast(({ workflow }) => ids.includes(workflow))
  const said = lost ? [element('p', { class: 'nexfort-small' }, lost)] : []
  if (!kept) return said
  return [...said, element('details', { open: true, class: 'nexfort-kept' }, element('summary', {}, text('benchmark.kept')), resultSection(kept))]
}

/** What people call a network: the file it comes from, where that is known. A VAE may come from the model's own. */
export function nameOf({ name, files, nodes }) {
  if (!files?.length) return name
  const isVae = nodes.length > 0 && nodes.every((node) => node.class === 'NexfortCompileVAE')
  return files.map(fileText).join(', ') + (isVae ? ' · VAE' : '')
}

/** Why what is compiled cannot be saved, with the path, which is told to this page alone; null once it can be. */
export async function whyUnsaved() {
  return (await change('cache/place', {}))?.problem ?? null
}

/** problem: the same with the path, which is told to this page alone. */
function engineSection(engine, { cache, memory }, problem) {
  const { name, nodes, report } = engine
  const kinds = nodes.map((node) => node.class)
  const section = element('section', {}, element('h3', {}, nameOf(engine)), ...speedSection(report.speed, kinds))
  const { unsaved } = report
  if (unsaved) section.append(element('p', { class: 'nexfort-banner', role: 'alert' }, text('report.unsaved', { reason: problem ?? unsaved })))
  if (isPlain(report)) section.append(element('p', { class: 'nexfort-banner' }, text('report.plain')))
  const verified = report.verifications.at(-1)
  if (verified) section.append(verification(verified))
  section.append(list('report.slower', slowerNow(report.pace ?? []).map(slowerLine)))
  section.append(list('report.eager', report.eager.map((row) => `${row.region}: ${row.reason}`)))
  section.append(details(name, report, cache, memory))
  return section
}

/** Whether its steps ran, nothing of them compiled, and no block has a reason: its blocks were never called. */
function isPlain({ calls, artefacts_compiled: compiled, artefacts_loaded: loaded, eager, compiling_beside: beside }) {
  return calls > 0 && !compiled && !loaded && !eager.length && !beside
}

/** What the engine did, in its own words. */
function details(name, report, cache, memory) {
  const lists = [
    ['report.variants', report.variants.map((row) => `${row.region}: ${row.reason}`)],
    ['report.precision', report.precision.map(precisionLine)],
    ['report.inactive', report.inactive.map((row) => `${row.token}: ${row.reason}`)],
    ['report.notes', report.notes]
  ]
  const parts = [facts(name, report, cache, memory), ...lists.map(([key, lines]) => list(key, lines))]
  if (report.artefacts.length) parts.push(artefacts(report.artefacts))
  return element('details', { class: 'nexfort-details' }, element('summary', {}, text('report.details')), parts)
}

function facts(name, report, cache, memory) {
  const kinds = new Set(report.regions.map((row) => row.kind)).size
  const rows = [
    ['cache.family', name],
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
  return element('details', { open: true }, element('summary', {}, counted(key, lines)), element('ul', {}, items))
}

function counted(key, rows) {
  return text('report.counted', { what: text(key), count: rows.length })
}

function artefacts(rows) {
  const headings = ['report.region', 'report.source', 'report.seconds'].map((key) => [text(key), key === 'report.seconds'])
  const lines = rows.map((row) => {
    const source = element('td', {}, text(`report.${row.source}`))
    return element('tr', {}, element('td', {}, row.region), source, numberCell(number(row.seconds)))
  })
  const summary = element('summary', {}, counted('report.artefacts', rows))
  return element('details', {}, summary, table(headings, lines))
}

/** Of the rows on each combination of sizes the last one counts. */
function slowerNow(rows) {
  const last = new Map(rows.map((row) => [JSON.stringify(row.sizes), row]))
  return [...last.values()].filter((row) => row.slower)
}

function slowerLine({ sizes, compiled_ms: ours, eager_ms: eager, reason }) {
  const at = sizes.map((size) => size.join('×')).join(', ')
  return text('report.slowerValue', { sizes: at, ours: number(ours), eager: number(eager), reason })
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
  const numbers = ['verify.eager', 'verify.ours', 'verify.speedup', 'verify.distance', 'verify.limit']
  const headings = ['cache.artefact', ...numbers, 'verify.judgement'].map((key) => [text(key), numbers.includes(key)])
  const lines = told.regions.map((row) =>
    element(
      'tr',
      {},
      element('td', {}, row.region),
      numberCell(number(row.eager_ms, 2)),
      numberCell(number(row.compiled_ms, 2)),
      numberCell(row.compiled_ms > 0 ? `${number(row.eager_ms / row.compiled_ms, 2)}×` : ''),
      numberCell(percent(apartOf(row))),
      numberCell(percent(row.limit)),
      element('td', { title: judgedBy(row) }, judgement(row))
    )
  )
  const where = element('p', { class: 'nexfort-small' }, `${told.device}, torch ${told.torch}, ${momentText(told.at, language())}`)
  const over = told.regions.some((row) => row.over)
  const summary = element('summary', {}, counted('verify.blocks', lines))
  const regions = element('details', { open: over }, summary, table(headings, lines))
  const parts = [element('summary', {}, text('verify.title')), ...samePicture(told.regions), element('p', {}, said), where, regions]
  return element('details', { open: true, class: 'nexfort-verified' }, parts)
}

/** The sentence of a verification: the block that is nearest to its limit, or farthest over it, speaks for all. */
function samePicture(rows) {
  const used = (row) => (apartOf(row) ?? Infinity) / (row.limit || Infinity)
  const worst = [...rows].sort((a, b) => a.over - b.over || used(a) - used(b)).at(-1)
  if (!worst) return []
  const values = { distance: percent(apartOf(worst)), limit: percent(worst.limit) }
  const isSame = !rows.some((row) => row.over)
  const verdict = isSame ? 'faster' : 'slower' // the colours of a headline
  return [element('p', { class: 'nexfort-headline', 'data-verdict': verdict }, text(isSame ? 'verify.same' : 'verify.differs', values))]
}

/** What is compared with the limit: where a wider computation judges, the error to that. */
function apartOf(row) {
  return row.error === null || row.unjudged ? row.distance : row.error
}

function judgement(row) {
  const [sign, key] = row.over ? ['✗', 'verify.over'] : row.unjudged ? ['–', 'verify.unjudged'] : ['✓', 'verify.equal']
  return `${sign} ${text(key)}`
}

/** A part of the norm in percent, with as many digits as say something. */
function percent(value) {
  if (value === null || value === undefined) return '∞'
  return `${(100 * value).toLocaleString(language(), { maximumSignificantDigits: 2 })} %`
}

function judgedBy(row) {
  if (row.unjudged) return row.unjudged
  return row.error === null ? '' : text('verify.errors', { ours: small(row.error), eager: small(row.eager_error) })
}

function small(value) {
  if (value === null) return '∞'
  if (value === 0) return '0'
  const [digits, power] = value.toExponential(1).split('e')
  return `${number(Number(digits))}e${power.replace('-', '\u2212')}` // a hyphen would let a line end there
}
