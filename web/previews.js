// SPDX-License-Identifier: Apache-2.0
// A prompt that leaves no file behind: previews stand where nodes would save. What saves is known by what the server
// tells of every node, and by the names of its inputs, so that nodes of other packs are known too.

// Inputs that draw noise.
export const SEEDS = ['seed', 'noise_seed']
// Inputs that say where a file goes.
const PLACES = /(^|_)(file_?name|prefix|path|folder|dir|directory)(_|$)/i

/**
 * A copy of a prompt without nodes that save, or only show. Each thing that one took is previewed: an image and the
 * images of a video as pictures, which lie in the temporary folder, anything else as text.
 */
export function withPreviews(prompt) {
  const made = structuredClone(prompt)
  const gone = Object.keys(made).filter((id) => isEnd(made, id))
  const wanted = gone.flatMap((id) => linksOf(made[id]).map((link) => source(made, link, gone)))
  for (const node of Object.values(made)) {
    for (const [name, value] of Object.entries(node.inputs)) if (isLink(value)) node.inputs[name] = source(made, value, gone)
  }
  for (const id of gone) delete made[id]
  dropLoose(made)
  const seen = new Set()
  for (const link of wanted.filter(([id]) => id in made).map((one) => picturesOf(made, one))) {
    if (seen.has(link.join())) continue
    seen.add(link.join())
    const isImage = typeOf(made, link) === 'IMAGE'
    made[`preview-${link.join('-')}`] = isImage ? { class_type: 'PreviewImage', inputs: { images: link } } : { class_type: 'PreviewAny', inputs: { source: link } }
  }
  return made
}

/** Whether a node saves, or ends the workflow by showing something. One that draws noise samples, whatever it shows. */
function isEnd(prompt, id) {
  const { class_type: kind, inputs } = prompt[id]
  if (!told(kind)?.output_node || SEEDS.some((name) => name in inputs)) return false
  if (Object.keys(inputs).some((name) => PLACES.test(name))) return true
  return !Object.values(prompt).some((node) => linksOf(node).some(([from]) => from === id))
}

/** Where a link begins: a node that is gone may have handed on what it took, such as the images that it saved. */
function source(prompt, link, gone) {
  if (!gone.includes(link[0])) return link
  const type = typeOf(prompt, link)
  const same = linksOf(prompt[link[0]]).find((one) => typeOf(prompt, one) === type)
  return same ? source(prompt, same, gone) : link
}

/** Take away what needs something that is gone. */
function dropLoose(prompt) {
  const loose = Object.keys(prompt).filter((id) => linksOf(prompt[id]).some(([from]) => !(from in prompt)))
  for (const id of loose) delete prompt[id]
  if (loose.length) dropLoose(prompt)
}

/** The link to the images that a video is made of; any other link as it is. */
function picturesOf(prompt, link) {
  if (typeOf(prompt, link) !== 'VIDEO') return link
  return linksOf(prompt[link[0]]).find((one) => typeOf(prompt, one) === 'IMAGE') ?? link
}

function typeOf(prompt, [id, slot]) {
  return told(prompt[id]?.class_type)?.output?.[slot]
}

/** What the server tells of a class of nodes. */
function told(kind) {
  return window.LiteGraph.registered_node_types[kind]?.nodeData
}

function linksOf({ inputs }) {
  return Object.values(inputs).filter(isLink)
}

function isLink(value) {
  return Array.isArray(value) && value.length === 2 && typeof value[0] === 'string' && typeof value[1] === 'number'
}
