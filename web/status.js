// SPDX-License-Identifier: Apache-2.0
// What each compile node does now: told by the server's events, and asked for where events may have been missed. The
// server knows a node by its workflow's id and its own; which of several tabs with one id is meant is known here.

import { app } from '../../scripts/app.js'
import { api } from '../../scripts/api.js'
import { ask } from './server.js'

const WAITING = { state: 'waiting', eager: 0 }
// The id of a workflow that was opened from a file in the API's format, until its tab is opened for a second time.
export const NO_ID = '00000000-0000-0000-0000-000000000000'
const states = new Map()
const listeners = new Set()
// By a workflow's id, the tab that queued it last: what is opened twice, such as a template, has one id in two tabs.
const queuedBy = new Map()
const TAB_EVERY = 200 // milliseconds
let shownTab

/** Call `listener` after each change; what comes back ends that. */
export function onStatus(listener) {
  listeners.add(listener)
  return () => listeners.delete(listener)
}

/** The state of a node of the graph. A node that never ran is waiting. */
export function statusOf(node) {
  return toldOf(node)[0] ?? WAITING
}

/** What the server told of a node: each with its "workflow" and its "id" there; none if it never ran. */
export function toldOf(node) {
  const root = app.rootGraph ?? app.graph
  const ids = idsOf(node, root)
  for (const workflow of workflowsOf(root)) {
    const found = ids.map((id) => states.get(placeOf(workflow, id))).filter((told) => told?.class === node.comfyClass)
    if (found.length) return found
  }
  return []
}

/** Whether anything is being compiled, as far as was told. */
export function compilesNow() {
  return [...states.values()].some(({ state }) => state === 'compiling' || state === 'background')
}

/** Ask for the state of all nodes. */
export async function refreshStatus() {
  const told = await ask('nodes', { quiet: true })
  if (told === undefined) return
  states.clear()
  take(told.nodes)
}

/** Listen to the server from now on. */
export function watchStatus() {
  api.addEventListener('nexfort.status', ({ detail }) => take(detail.nodes))
  api.addEventListener('promptQueueing', queuesHere)
  const ends = ['execution_success', 'execution_error', 'execution_interrupted', 'reconnected']
  for (const name of ends) api.addEventListener(name, refreshStatus)
  // The front end (1.49) tells extensions of a graph that it loads before its tab is the active one, and not after.
  setInterval(() => {
    if (activeTab() !== shownTab) tell()
  }, TAB_EVERY)
  return refreshStatus()
}

/** From now on the states of the open workflow's id are those of the open tab. */
export function queuesHere() {
  queuedBy.set((app.rootGraph ?? app.graph).id, activeTab())
  tell()
}

/** The ids under which a prompt holds a node: inside a subgraph they begin with those of the nodes around it. */
function idsOf(node, root) {
  if (!node.graph || node.graph === root) return [String(node.id)]
  return placesOf(node.graph, root).map((place) => `${place}:${node.id}`)
}

/** The ids of all nodes that stand for a subgraph, wherever they are below `graph`. */
function placesOf(subgraph, graph) {
  const around = graph.nodes.filter((node) => node.isSubgraphNode?.())
  return around.flatMap((node) => {
    const inside = placesOf(subgraph, node.subgraph).map((place) => `${node.id}:${place}`)
    return node.subgraph === subgraph ? [String(node.id), ...inside] : inside
  })
}

/** The workflows whose states are those of the open tab, best first: its own, then prompts queued without one. */
function workflowsOf(root) {
  return [root.id, NO_ID].filter(isHere).concat([null])
}

function isHere(workflow) {
  const tab = queuedBy.get(workflow)
  return tab === activeTab() || !app.extensionManager?.workflow?.openWorkflows?.includes(tab)
}

function activeTab() {
  return app.extensionManager?.workflow?.activeWorkflow
}

function placeOf(workflow, id) {
  return `${workflow ?? ''} ${id}`
}

function take(nodes) {
  for (const node of nodes) states.set(placeOf(node.workflow, node.id), node)
  tell()
}

function tell() {
  shownTab = activeTab()
  for (const listener of listeners) listener()
}
