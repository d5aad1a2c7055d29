// SPDX-License-Identifier: Apache-2.0
// Requests to our routes. A refusal becomes a toast with the server's own sentence, and undefined for whoever asked.

import { api } from '../../scripts/api.js'
import { toast } from './front_end.js'
import { text } from './texts.js'

/** What a GET route tells, or undefined. quiet: nobody asked for it, so a failure is only logged. */
export async function ask(route, { quiet = false } = {}) {
  return answered(() => api.fetchApi(`/nexfort/${route}`, { cache: 'no-store' }), quiet)
}

/** What a POST route tells, or undefined. */
export async function change(route, body) {
  const headers = { 'Content-Type': 'application/json' }
  return answered(() => api.fetchApi(`/nexfort/${route}`, { method: 'POST', headers, body: JSON.stringify(body) }), false)
}

async function answered(send, quiet) {
  try {
    const answer = await send()
    const told = await answer.json().catch(() => ({}))
    if (answer.ok) return told
    refuse(told.error ?? `${answer.status} ${answer.statusText}`, quiet)
  } catch (error) {
    refuse(text('toast.unreachable', { reason: error.message }), quiet)
  }
  return undefined
}

function refuse(reason, quiet) {
  if (quiet) console.info(`Nexfort: ${reason}`)
  else toast('error', text('toast.refused'), reason)
}
