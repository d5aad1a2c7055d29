// SPDX-License-Identifier: Apache-2.0
// The command that puts our nodes in the place of other packs' compile nodes in the open workflow, because the user
// asks for it. Nodes that are not installed are left to ComfyUI, which offers to replace them itself. What is replaced
// by what is told by the server: the list in nodes/replacements.py.

import { app } from '../../scripts/app.js'
import { api } from '../../scripts/api.js'
import { meant, toast } from './front_end.js'
import { text } from './texts.js'

/** Replace them after a question, as one step that can be undone. */
export async function replaceCompileNodes() {
  const rules = await ourRules()
  if (rules === undefined) return
  const graphs = [app.rootGraph ?? app.graph, ...((app.rootGraph ?? app.graph).subgraphs?.values() ?? [])]
  const found = graphs.flatMap((graph) => [...graph.nodes]).filter((node) => rules.has(node.type) && isInstalled(node))
  if (!found.length) {
    toast('info', text('replace.title'), text('replace.nothing'))
    return
  }
  const names = found.map((node) => (node.title === node.type ? node.type : `${node.title} (${node.type})`))
  const question = { title: text('replace.title'), message: text('replace.question', { count: found.length }) }
  if (!(await meant({ ...question, itemList: [...new Set(names)] }))) return
  app.canvas.emitBeforeChange()
  try {
    for (const node of found) replace(node, rules.get(node.type))
  } finally {
    app.canvas.emitAfterChange()
  }
  toast('success', text('replace.title'), text('replace.done', { count: found.length }))
}

/** By the id of the old node, what replaces it with one of ours and keeps its link; undefined where nothing is told. */
async function ourRules() {
  const answer = await api.fetchApi('/node_replacements').catch((error) => ({ ok: false, statusText: error.message }))
  if (!answer.ok) {
    toast('error', text('replace.title'), text('replace.untold', { reason: answer.statusText || answer.status }))
    return undefined
  }
  const ours = Object.values(await answer.json())
    .flat()
    .filter((rule) => rule.new_node_id.startsWith('Nexfort') && rule.output_mapping)
  return new Map(ours.map((rule) => [rule.old_node_id, rule]))
}

function isInstalled(node) {
  return node.type in window.LiteGraph.registered_node_types
}

function replace(old, rule) {
  const graph = old.graph
  const made = window.LiteGraph.createNode(rule.new_node_id)
  made.pos = [...old.pos]
  made.mode = old.mode // bypassed and muted nodes stay so
  made.color = old.color
  made.bgcolor = old.bgcolor
  if (old.title !== old.constructor.title) made.title = old.title
  graph.add(made)
  for (const { old_id, new_id } of rule.input_mapping) if (old_id) takeInput(old, old_id, made, new_id)
  for (const { old_idx, new_idx } of rule.output_mapping) takeOutput(old, old_idx, made, new_idx)
  graph.remove(old)
}

function takeInput(old, oldName, made, newName) {
  const link = old.getInputLink(old.findInputSlot(oldName))
  if (!link) return
  const slot = made.findInputSlot(newName)
  const { outputNode, subgraphInput } = link.resolve(old.graph)
  if (subgraphInput) subgraphInput.connect(made.inputs[slot], made, link.parentId)
  else outputNode?.connect(link.origin_slot, made, slot, link.parentId)
}

function takeOutput(old, oldSlot, made, newSlot) {
  for (const id of [...(old.outputs[oldSlot]?.links ?? [])]) {
    const link = old.graph.getLink(id)
    const { inputNode, subgraphOutput } = link.resolve(old.graph)
    if (subgraphOutput) subgraphOutput.connect(made.outputs[newSlot], made, link.parentId)
    else if (inputNode) made.connect(newSlot, inputNode, link.target_slot, link.parentId)
  }
}
