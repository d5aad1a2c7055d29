// SPDX-License-Identifier: Apache-2.0
// What each compile node does now: told by the server's events, and asked for where events may have been missed.

import { app } from '../../scripts/app.js'
import { api } from '../../scripts/api.js'
import { ask } from './server.js'

const WAITING = { state: 'waiting', eager: 0 }
const states = new Map()
const listeners = new Set()

/** Call `listener` after each change; what comes back ends that. */
export function onStatus(listener) {
  listeners.add(listener)
  return () => listeners.delete(listener)
}

/** The state of a node of the graph. A node that never ran is waiting. */
export function statusOf(node) {
  for (const id of idsOf(node)) {
    const found = states.get(id)
    if (found?.class === node.comfyClass) return found
  }
  return WAITING
}

/** The ids under which the server may know a node: inside a subgraph they begin with those of the nodes around it. */
export function idsOf(node) {
  const id = String(node.id)
  const root = app.rootGraph ?? app.graph
  if (!node.graph || node.graph === root) return [id]
  return [...states.keys()].filter((one) => one.endsWith(`:${id}`))
}

/** Whether the server knows of a node with this id. */
export function isKnown(id) {
  return states.has(id)
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
  const ends = ['execution_success', 'execution_error', 'execution_interrupted', 'reconnected']
  for (const name of ends) api.addEventListener(name, refreshStatus)
  return refreshStatus()
}

function take(nodes) {
  for (const node of nodes) states.set(node.id, node)
  for (const listener of listeners) listener()
}
