// SPDX-License-Identifier: Apache-2.0
// Nexfort's face in ComfyUI: badges and reports of the compile nodes, the tab of the cache, settings and commands.
// Only what ComfyUI offers to extensions is used, and nothing of it is replaced.

import { app } from '../../scripts/app.js'
import { api } from '../../scripts/api.js'
import { COMPILE_NODES, addBadge, drawBadges, showBadges, watchBadges } from './badge.js'
import { benchmarkWorkflow } from './benchmark.js'
import { CACHE_LIMIT, clearCache, leaveCacheTab, limitBytes, pruneCache, refreshCache, renderCacheTab } from './cache_tab.js'
import { loadStyles } from './elements.js'
import { openTab, registerTab, settingOf, toast } from './front_end.js'
import { foldOptions, watchOptions } from './options.js'
import { replaceCompileNodes } from './replace.js'
import { nameOf, openReport, verifyNext, whyUnsaved } from './report.js'
import { ask, change } from './server.js'
import { watchStatus } from './status.js'
import { text, textsReady } from './texts.js'

const TAB = 'nexfort'
const DEFAULT_MODE = 'Nexfort.Nodes.DefaultMode'
const VERIFY = 'Nexfort.Nodes.Verify'
const TELL_EAGER = 'Nexfort.Nodes.TellEager'
// What people call the modes; the values are those of the API.
const MODE_NAMES = {
  O2: 'mode.balanced',
  'max-autotune': 'mode.thorough',
  'max-optimize:max-autotune': 'mode.widest',
  'jit:disable-runtime-fusion': 'mode.quick',
  O3: 'mode.fp8'
}
const DEFAULT = 'O2'
// The English name is made for the search, and too long for a title.
const LONG_NAME = /^Compile Model \(Nexfort: .*\)$/
const told = new Set()

/** After a run: hold the cache to the limit that is set, show what it holds now, and say once what ran uncompiled. */
async function afterRun() {
  const limit = limitBytes()
  if (limit !== null) await change('cache/prune', { max_bytes: limit })
  await refreshCache()
  const report = await ask('report', { quiet: true })
  for (const { report: one } of report?.engines ?? []) await tellUnsaved(one.unsaved)
  if (settingOf(TELL_EAGER) === false) return
  for (const engine of report?.engines ?? []) {
    const { report: one } = engine
    const name = nameOf(engine)
    const reasons = one.eager.map((row) => row.reason).filter((reason) => !told.has(`${name}: ${reason}`))
    for (const reason of reasons) told.add(`${name}: ${reason}`)
    if (reasons.length) toast('warn', text('toast.eager', { name }), [...new Set(reasons)].join('\n'))
  }
}

/** Say once why what is compiled cannot be saved. */
async function tellUnsaved(reason) {
  if (!reason || told.has(reason)) return
  told.add(reason)
  toast('warn', text('toast.unsaved'), (await whyUnsaved()) ?? reason)
}

app.registerExtension({
  name: 'Nexfort',
  settings: [
    {
      id: DEFAULT_MODE,
      category: ['Nexfort', 'Nodes', 'DefaultMode'],
      name: 'Mode of new compile nodes',
      tooltip: 'How much time a compile node that you add spends on compiling. Nodes that are there already keep theirs.',
      type: 'combo',
      options: () => Object.keys(MODE_NAMES).map((value) => ({ value, text: text(MODE_NAMES[value]) })),
      defaultValue: DEFAULT
    },
    {
      id: VERIFY,
      category: ['Nexfort', 'Nodes', 'Verify'],
      name: 'Verify after compiling, in new compile nodes',
      tooltip: 'Switches on "verify" in compile nodes that you add: the first step is compared with the uncompiled one.',
      type: 'boolean',
      defaultValue: false
    },
    {
      id: 'Nexfort.Nodes.ShowBadges',
      category: ['Nexfort', 'Nodes', 'ShowBadges'],
      name: 'Show the state on compile nodes',
      tooltip: 'A line on each compile node says whether it waits, compiles or runs compiled, and opens its report.',
      type: 'boolean',
      defaultValue: true,
      onChange: showBadges
    },
    {
      id: TELL_EAGER,
      category: ['Nexfort', 'Nodes', 'TellEager'],
      name: 'Say when blocks run uncompiled',
      tooltip: 'After a run a message names the reason, once for each. The report names it in any case.',
      type: 'boolean',
      defaultValue: true
    },
    {
      id: CACHE_LIMIT,
      category: ['Nexfort', 'Cache', 'Limit'],
      name: 'Compile cache size limit (GiB)',
      tooltip: 'After each run what was used least recently is removed until the rest fits. 0: the limit of the server.',
      type: 'number',
      attrs: { min: 0, max: 1024, step: 1 },
      defaultValue: 0,
      onChange: refreshCache
    }
  ],
  commands: [
    { id: 'Nexfort.ShowReport', label: 'Nexfort: show the report', menubarLabel: 'Show the report', icon: 'pi pi-chart-bar', function: () => openReport() },
    { id: 'Nexfort.Verify', label: 'Nexfort: verify the next step', menubarLabel: 'Verify the next step', icon: 'pi pi-check-circle', function: () => verifyNext() },
    { id: 'Nexfort.Benchmark', label: 'Nexfort: benchmark this workflow', menubarLabel: 'Benchmark this workflow', icon: 'pi pi-stopwatch', function: benchmarkWorkflow },
    { id: 'Nexfort.ShowCache', label: 'Nexfort: show the compile cache', menubarLabel: 'Show the compile cache', icon: 'pi pi-database', function: () => openTab(TAB) },
    {
      id: 'Nexfort.PruneCache',
      label: 'Nexfort: prune the compile cache',
      menubarLabel: 'Prune the compile cache',
      icon: 'pi pi-filter',
      function: () => (limitBytes() === null ? toast('info', text('cache.prune'), text('cache.limitWanted')) : pruneCache(limitBytes()))
    },
    { id: 'Nexfort.ClearCache', label: 'Nexfort: clear the compile cache', menubarLabel: 'Clear the compile cache', icon: 'pi pi-trash', function: clearCache },
    {
      id: 'Nexfort.ReplaceNodes',
      label: 'Nexfort: replace other compile nodes',
      menubarLabel: 'Replace other compile nodes',
      icon: 'pi pi-replay',
      function: replaceCompileNodes
    }
  ],
  menuCommands: [
    {
      path: ['Extensions', 'Nexfort'],
      commands: [
        'Nexfort.ShowReport',
        'Nexfort.Verify',
        'Nexfort.Benchmark',
        'Nexfort.ShowCache',
        'Nexfort.PruneCache',
        'Nexfort.ClearCache',
        'Nexfort.ReplaceNodes'
      ]
    }
  ],

  async setup() {
    loadStyles()
    const tab = { id: TAB, icon: 'pi pi-bolt', title: 'Nexfort', tooltip: 'Nexfort', type: 'custom' }
    registerTab({ ...tab, render: renderCacheTab, destroy: leaveCacheTab })
    watchBadges()
    watchOptions()
    api.addEventListener('execution_success', afterRun)
    await textsReady
    await watchStatus()
  },

  nodeCreated(node) {
    if (!COMPILE_NODES.includes(node.comfyClass)) return
    // A node of a workflow that is loaded gets its own values after this.
    const mode = node.widgets?.find((widget) => widget.name === 'mode')
    if (mode?.options.values.includes(settingOf(DEFAULT_MODE))) mode.value = settingOf(DEFAULT_MODE)
    if (mode) mode.options.getOptionLabel = (value) => (MODE_NAMES[value] ? text(MODE_NAMES[value]) : value)
    const verify = node.widgets?.find((widget) => widget.name === 'verify')
    if (verify) verify.value = settingOf(VERIFY) === true
    if (LONG_NAME.test(node.title)) node.title = 'Nexfort Compile Model'
    foldOptions(node)
    addBadge(node)
  },

  afterConfigureGraph() {
    drawBadges()
  }
})
