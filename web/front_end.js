// SPDX-License-Identifier: Apache-2.0
// What ComfyUI's front end offers to extensions, asked for where it is used: another front end may lack some of it. What
// is lacking is named once in the browser's console, and everything else goes on.

import { app } from '../../scripts/app.js'

const named = new Set()

/** A function of app.extensionManager, or of a part of that, or undefined. instead: what happens without it. */
function offered(part, name, instead) {
  const owner = part ? app.extensionManager?.[part] : app.extensionManager
  if (typeof owner?.[name] === 'function') return (...given) => owner[name](...given)
  const full = ['extensionManager', part, name].filter(Boolean).join('.')
  if (!named.has(full)) console.info(`Nexfort: this front end lacks ${full}: ${instead}`)
  named.add(full)
  return undefined
}

/** Put a tab into the sidebar, if there can be any. */
export function registerTab(tab) {
  offered(null, 'registerSidebarTab', 'there is no tab of the compile cache')?.(tab)
}

/** Show a tab of the sidebar. */
export function openTab(id) {
  if (app.extensionManager?.sidebarTab?.activeSidebarTabId === id) return
  offered('sidebarTab', 'toggleSidebarTab', 'a command cannot open its tab')?.(id)
}

/** A short message in the corner. */
export function toast(severity, summary, detail) {
  const add = offered('toast', 'add', 'messages are written here')
  if (add) add({ severity, summary, detail, life: ['error', 'warn'].includes(severity) ? 10000 : 5000 })
  else console.info(`Nexfort: ${summary}: ${detail}`)
}

/** Ask; whether the user means it. question: its "title" and "message", and an "itemList" of names. */
export async function meant(question) {
  const confirm = offered('dialog', 'confirm', 'the browser asks instead')
  if (confirm) return confirm(question)
  return window.confirm([question.title, question.message, ...(question.itemList ?? [])].join('\n\n'))
}

/** The value of a setting, undefined where there are none. */
export function settingOf(id) {
  return offered('setting', 'get', 'settings are as at first')?.(id)
}
