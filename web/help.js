// SPDX-License-Identifier: Apache-2.0
// One click for help: what GET /nexfort/help tells goes to the clipboard, or into the form of the repository.

import { element } from './elements.js'
import { ask } from './server.js'
import { text } from './texts.js'

const LONGEST = 6000 // characters in an address, which browsers and the form still take
const FORM = 'problem.yml' // in the repository's .github/ISSUE_TEMPLATE

/** Put the report and the facts about the machine into the clipboard; what is said of it. */
export async function copyReport() {
  const told = await ask('help')
  if (told === undefined) return ''
  return text((await copied(told.markdown)) ? 'help.copied' : 'help.notCopied')
}

/** Open the form of the repository with the report in it; what is too long for that is in the clipboard. */
export async function reportProblem() {
  const told = await ask('help')
  if (told === undefined) return
  const fits = told.markdown.length <= LONGEST
  if (!fits) await copied(told.markdown)
  const report = fits ? told.markdown : `${text('help.paste')}\n`
  open(`${told.issues}?${new URLSearchParams({ template: FORM, report })}`)
}

/** Open the page of symptoms and cures. */
export async function openPage() {
  const told = await ask('help')
  if (told !== undefined) open(told.page)
}

function open(address) {
  window.open(address, '_blank', 'noopener')
}

/** Whether it is in the clipboard. Pages that came over http from another machine have only the old way. */
export async function copied(words) {
  try {
    await navigator.clipboard.writeText(words)
    return true
  } catch {
    const area = element('textarea', { class: 'nexfort-copied', 'aria-hidden': 'true' })
    area.value = words
    const place = document.querySelector('dialog[open]') ?? document.body // what lies outside a dialog has no focus
    place.append(area)
    area.select()
    const done = document.execCommand('copy')
    area.remove()
    return done
  }
}
