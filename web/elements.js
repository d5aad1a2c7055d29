// SPDX-License-Identifier: Apache-2.0
// HTML elements and readable quantities. Text is only ever set as text: what an artefact says of itself may come from
// somebody else's bundle.

import { number } from './texts.js'

/** An element: attributes that are functions listen to that event, those that are null or false are left out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === 'function') made.addEventListener(name, value)
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? '' : value)
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined))
  return made
}

/** A button with a text. */
export function button(label, click, attributes = {}) {
  return element('button', { type: 'button', class: 'nexfort-button', click, ...attributes }, label)
}

/** A table: its headings by [text, whether its column holds numbers], its lines as rows. */
export function table(headings, lines) {
  const cells = headings.map(([label, numbers]) => element('th', { scope: 'col', class: numbers && 'nexfort-number' }, label))
  return element('table', {}, element('thead', {}, element('tr', {}, cells)), element('tbody', {}, lines))
}

/** A cell in a column of numbers. */
export function numberCell(...content) {
  return element('td', { class: 'nexfort-number' }, ...content)
}

/** A dialog that is on the page and not shown yet: a heading with tools and a button that closes it, then the rest. */
export function dialogOf(kind, { heading, close, tools = [] }, ...rest) {
  const id = `nexfort-${kind}-title`
  const made = element('dialog', { class: `nexfort-panel nexfort-dialog nexfort-${kind}`, 'aria-labelledby': id })
  const row = element('div', { class: 'nexfort-row' }, tools, button(close, () => made.close()))
  made.append(element('header', {}, element('h2', { id }, heading), row), ...rest)
  made.addEventListener('close', () => made.remove())
  document.body.append(made)
  return made
}

/** A dotted name that a line may break after its dots and underscores, and not within a word. */
export function nameText(name) {
  return name.split(/(?<=[._])/).flatMap((part, place) => (place ? [element('wbr'), part] : [part]))
}

/** A model file's name as people say it. */
export function fileText(file) {
  return file.replace(/\.[^.]+$/, '')
}

/** "512 B", "3.4 MiB", as the command line writes it but for the language's way of writing numbers. */
export function sizeText(bytes) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB']
  let count = bytes
  let unit = 0
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024
    unit += 1
  }
  return unit === 0 ? `${count} B` : `${number(count)} ${units[unit]}`
}

/** A moment of the server in the time and the way of writing of whoever looks. */
export function momentText(text, locale) {
  const moment = new Date(text)
  if (Number.isNaN(moment.getTime())) return '?'
  return moment.toLocaleString(locale, { dateStyle: 'short', timeStyle: 'short' })
}

/** The day of a moment of the server as people say it: today, yesterday, 5 days ago. */
export function dayText(text, locale) {
  const moment = new Date(text)
  if (Number.isNaN(moment.getTime())) return '?'
  const day = (at) => Date.UTC(at.getFullYear(), at.getMonth(), at.getDate()) / 86_400_000
  return new Intl.RelativeTimeFormat(locale, { numeric: 'auto' }).format(day(moment) - day(new Date()), 'day')
}

/** Give the user a file that is made here. */
export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }))
  const link = element('a', { href: address, download: name })
  link.click()
  setTimeout(() => URL.revokeObjectURL(address), 1000)
}

/** Load the style sheet that lies beside these modules, once. */
export function loadStyles() {
  const address = new URL('./nexfort.css', import.meta.url).href
  if (document.querySelector(`link[href="${address}"]`)) return
  document.head.append(element('link', { rel: 'stylesheet', href: address }))
}
