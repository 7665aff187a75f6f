/** What a reload of this tab keeps; the browser forgets it with the tab. */

const NAME = `diffray chat 1 ${location.pathname}`;

/** Keep a value, if the browser allows it and has room; else nothing rather than an older one. */
export function keep(value) {
  try {
    sessionStorage.removeItem(NAME);
    sessionStorage.setItem(NAME, JSON.stringify(value));
  } catch {}
}

/** Return what was kept, or null. */
export function kept() {
  try {
    return JSON.parse(sessionStorage.getItem(NAME));
  } catch {
    return null;
  }
}
