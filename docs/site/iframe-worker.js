// Search in pages that are opened as files: browsers refuse them workers, so the worker's script runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #ready;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow;
      // What a worker's script finds in its own scope.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => urls.reduce((last, each) => last.then(() => this.#load(each)), Promise.resolve());
      this.#ready = this.#load(url);
    }

    postMessage(data) {
      const inside = this.#frame.contentWindow;
      this.#ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }

    #load(url) {
      const script = this.#frame.contentDocument.createElement("script");
      script.src = new URL(url, location.href);
      const done = new Promise((resolve, reject) => Object.assign(script, { onload: resolve, onerror: reject }));
      this.#frame.contentDocument.head.append(script);
      return done;
    }
  };
  window.Worker = window.IFrameWorker;
}
