// Browsers start no worker for a page that was opened as a file. There, search runs in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow, script = inside.document.createElement("script");
      // What the script posts is meant for us, not for the frame's own listeners.
      inside.postMessage = data => setTimeout(() => this.onmessage?.({ data }));
      this.ready = new Promise((loaded, failed) => { script.onload = loaded; script.onerror = failed; });
      this.ready.catch(error => this.onerror?.(error));
      script.src = url;
      inside.document.head.append(script);
    }

    postMessage(data) {
      this.ready.then(() => {
        const inside = this.frame.contentWindow;
        inside?.dispatchEvent(new inside.MessageEvent("message", { data }));
      });
    }

    terminate() { this.frame.remove(); }
  };
