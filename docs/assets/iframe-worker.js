// Search in a site that is opened as files. Browsers start no Worker from file://, so it runs in a hidden frame;
// the theme looks for the name IFrameWorker.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html>"
      this.ready = new Promise(done => {
        frame.onload = () => {
          const inside = frame.contentWindow
          const load = source => new Promise((loaded, failed) => {
            const script = inside.document.createElement("script")
            Object.assign(script, { src: source, onload: loaded, onerror: failed })
            inside.document.body.append(script)
          })
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          inside.importScripts = async (...sources) => {
            for (const source of sources) await load(source)
          }
          load(url).then(() => done(inside))
        }
      })
      document.body.append(frame)
    }

    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
  }
  window.Worker = window.IFrameWorker
}
