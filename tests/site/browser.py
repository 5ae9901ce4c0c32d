# SPDX-License-Identifier: Apache-2.0
# A headless Chromium, driven over its DevTools protocol through a pair of pipes: pages, keys, screenshots. Imported by
# tests/site/page_test.py and pages_test.py. Python's standard library only; docs/testing.md says how it is run.
import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ["chromium", "chromium-browser", "google-chrome", "chrome"]
PATIENCE = 120  # seconds, for a busy machine


def find_browser():
    """The browser that $TESSERA_TEST_BROWSER names, else one on the path, else None."""
    named = os.environ.get("TESSERA_TEST_BROWSER")
    return named or next((path for path in map(shutil.which, NAMES) if path), None)


DIFFERENCE = """(async (one, other) => {
  const pixels = async (png) => {
    const image = new Image();
    image.src = `data:image/png;base64,${png}`;
    await image.decode();
    const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
    canvas.drawImage(image, 0, 0);
    return canvas.getImageData(0, 0, image.width, image.height).data;
  };
  const [a, b] = [await pixels(one), await pixels(other)];
  let count = 0;
  for (let k = 0; k < a.length; k += 4) count += [0, 1, 2].some((c) => Math.abs(a[k + c] - b[k + c]) > 64);
  return count;
})("%s", "%s")"""


class Browser:
    """One page at a time. Everything that the page complains about is collected in `complaints`."""

    def __init__(self, program):
        self.folder = tempfile.TemporaryDirectory(prefix="tessera-browser-", ignore_cleanup_errors=True)
        to_read, self.write_end = os.pipe()
        self.read_end, to_write = os.pipe()

        def pipes_at_3_and_4():  # where --remote-debugging-pipe expects them
            kept = os.dup(to_read), os.dup(to_write)
            os.dup2(kept[0], 3), os.dup2(kept[1], 4)

        command = [program, "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
                   "--hide-scrollbars", "--disable-extensions", f"--user-data-dir={self.folder.name}", "about:blank"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                        close_fds=False, preexec_fn=pipes_at_3_and_4)
        os.close(to_read), os.close(to_write)
        self.buffer, self.number, self.session, self.complaints, self.loaded = b"", 0, None, [], False
        self.context = None

    def renew(self):
        """A window of its own, as for a visitor who comes for the first time. Clearing what pages stored would not do:
        Chromium may write it down after that."""
        self.session = None
        if self.context:
            self.call("Target.disposeBrowserContext", browserContextId=self.context)
        self.context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=self.context)["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Log", "Network"]:
            self.call(f"{domain}.enable")

    def close(self):
        self.session = None
        try:
            self.call("Browser.close")
        except (OSError, EOFError):
            pass
        self.process.wait(PATIENCE)
        self.folder.cleanup()

    def receive(self):
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read_end], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser said nothing for {PATIENCE} s")
            part = os.read(self.read_end, 1 << 20)
            if not part:
                raise EOFError("the browser has ended")
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.note(answer)

    def note(self, event):
        if event.get("sessionId") != self.session:
            return  # of a window that was closed
        name, parameters = event.get("method"), event.get("params", {})
        if name == "Page.loadEventFired":
            self.loaded = True
        elif name == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif name == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif name == "Network.loadingFailed" and not parameters.get("canceled"):
            self.complaints.append(f"{parameters['type']}: {parameters['errorText']}")

    def open(self, address, width=1360, height=900, dark=False, phone=False):
        self.renew()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"}])
        self.loaded = False
        self.call("Page.navigate", url=address)
        while not self.loaded:
            self.note(self.receive())
        elsewhere = "false" if address == "about:blank" else "location.href === 'about:blank'"
        while self.ask(f"{elsewhere} || document.readyState !== 'complete'"):  # the event may have been the empty window's
            time.sleep(0.02)

    def ask(self, expression):
        """The value of a JavaScript expression, a promise's included."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", expression))
        return answer["result"].get("value")

    def difference(self, one, other):
        """How many pixels of two screenshots of one size differ. Edges may, a little: Chromium paints parts anew."""
        self.open("about:blank")
        return self.ask(DIFFERENCE % tuple(base64.b64encode(picture).decode() for picture in (one, other)))

    def press(self, key, shift=False):
        codes = {"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, "Tab": 9, " ": 32}
        code = codes.get(key, ord(key[0].upper()))
        common = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path=None, whole=False):
        """PNG bytes of the window, or of the whole page."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        content = base64.b64decode(picture["data"])
        if path:
            with open(path, "wb") as out:
                out.write(content)
        return content
