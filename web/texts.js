// SPDX-License-Identifier: Apache-2.0
// The texts of our panels in the user's language, from locales/<language>/main.json as the server hands it out.

import { app } from '../../scripts/app.js'
import { api } from '../../scripts/api.js'

const SOURCE = 'en'
let texts = {}

/** Resolves when texts are there. Without them their keys are shown, which is ugly and works. */
export const textsReady = loadTexts()

async function loadTexts() {
  try {
    const answer = await api.fetchApi('/i18n')
    if (!answer.ok) throw new Error(`GET /i18n was answered with ${answer.status}`)
    texts = await answer.json()
  } catch (error) {
    console.warn('Nexfort: its texts could not be loaded, so that names stand in their places:', error)
  }
}

/** The language that is set, as a tag such as "en" or "zh". */
export function language() {
  return app.extensionManager?.setting?.get('Comfy.Locale') ?? SOURCE
}

/**
 * The text under a dotted key, in English if the language has none, with {names} replaced. Of a text with plural forms,
 * the one for values.count.
 */
export function text(key, values = {}) {
  const tag = find(texts[language()], key) === undefined ? SOURCE : language()
  const found = find(texts[tag], key) ?? key
  const said = typeof found === 'string' ? found : (found[new Intl.PluralRules(tag).select(values.count)] ?? found.other)
  return said.replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole))
}

/** A number in the language's way of writing, with this many digits behind the point. */
export function number(value, digits = 1) {
  return value.toLocaleString(language(), { minimumFractionDigits: digits, maximumFractionDigits: digits })
}

/** A length of time in the language's way of writing, roughly: seconds, or minutes where it is long. */
export function duration(seconds) {
  const [value, unit] = seconds < 100 ? [seconds, 'second'] : [Math.round(seconds / 60), 'minute']
  return value.toLocaleString(language(), { style: 'unit', unit, unitDisplay: 'short' })
}

function find(tree, key) {
  let node = tree?.nexfort
  for (const part of key.split('.')) node = node?.[part]
  return typeof node === 'string' || typeof node?.other === 'string' ? node : undefined
}
