//! Chromium without a window, driven by its DevTools protocol over two pipes (`--remote-debugging-pipe`): no port, no network.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use std::{env, thread};

use serde_json::{Value, json};
use tempfile::TempDir;

/// The longest that one answer may take.
const PATIENCE: Duration = Duration::from_secs(20);

const PROGRAMS: [&str; 5] = [
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome-headless-shell",
];

const FLAGS: [&str; 10] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
];

/// A browser with one page.
pub(crate) struct Browser {
    process: Child,
    to: File,
    from: Receiver<Value>,
    session: String,
    sent: u64,
    /// What it told unasked.
    events: Vec<Value>,
    // Removed after the process has ended.
    _folder: TempDir,
}

impl Browser {
    /// Starts one; none where no program is found, saying so.
    pub(crate) fn start() -> Option<Self> {
        let Some(program) = program() else {
            println!("skipped: no Chromium here, looked for {}", PROGRAMS.join(", "));
            return None;
        };
        let folder = TempDir::new().unwrap();
        let [input, output] = ["in", "out"].map(|name| folder.path().join(name));
        assert!(Command::new("mkfifo").args([&input, &output]).status().unwrap().success());
        let profile = format!("--user-data-dir={}", folder.path().join("profile").display());
        let process = Command::new("sh")
            .args(["-c", "exec \"$@\" 3<\"$IN\" 4>\"$OUT\"", "sh"])
            .arg(program)
            .args(FLAGS)
            .args([&profile, "about:blank"])
            .env("IN", &input)
            .env("OUT", &output)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // For both, so that nothing waits for a browser that does not open its ends.
        let open = |path: &Path| OpenOptions::new().read(true).write(true).open(path).unwrap();
        let from = messages(open(&output));
        let mut browser = Self {
            process,
            to: open(&input),
            from,
            session: String::new(),
            sent: 0,
            events: Vec::new(),
            _folder: folder,
        };
        browser.attach();
        Some(browser)
    }

    fn attach(&mut self) {
        let target = self.call("Target.createTarget", &json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = self.call("Target.attachToTarget", &attach);
        self.session = session["sessionId"].as_str().unwrap().to_owned();
        for domain in ["Page", "Runtime", "Log", "Network"] {
            self.call(&format!("{domain}.enable"), &json!({}));
        }
        let size =
            json!({ "width": 1400, "height": 1000, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", &size);
    }

    /// Calls a method of the protocol.
    pub(crate) fn call(&mut self, method: &str, params: &Value) -> Value {
        self.sent += 1;
        let mut message = json!({ "id": self.sent, "method": method, "params": params });
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        let mut bytes = serde_json::to_vec(&message).unwrap();
        bytes.push(0);
        self.to.write_all(&bytes).unwrap();
        loop {
            let answer = self.from.recv_timeout(PATIENCE);
            let answer = answer.unwrap_or_else(|error| panic!("{method}: {error}"));
            if answer["id"] == self.sent {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].clone();
            }
            self.events.push(answer);
        }
    }

    /// The value of an expression in the page.
    #[track_caller]
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let params =
            json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let result = self.call("Runtime.evaluate", &params);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result:#}");
        result["result"]["value"].clone()
    }

    /// Opens a page and waits until it is ready.
    #[track_caller]
    pub(crate) fn open(&mut self, address: &str) {
        // Another fragment of the same page would load nothing.
        self.call("Page.navigate", &json!({ "url": "about:blank" }));
        self.call("Page.navigate", &json!({ "url": address }));
        let ready = "document.readyState === 'complete' && document.documentElement.dataset.ready";
        let begin = Instant::now();
        while self.value(ready) != "true" {
            let status = "document.getElementById('status')?.textContent";
            assert!(begin.elapsed() < PATIENCE, "not ready: {}", self.value(status));
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Opens the page in a file.
    #[track_caller]
    pub(crate) fn open_file(&mut self, path: &Path) {
        self.open(&format!("file://{}", path.display()));
    }

    /// Presses and releases a key.
    pub(crate) fn press(&mut self, key: &str) {
        for kind in ["keyDown", "keyUp"] {
            self.call("Input.dispatchKeyEvent", &json!({ "type": kind, "key": key, "code": key }));
        }
    }

    /// Clicks at the middle of an element, which is brought into sight first.
    #[track_caller]
    pub(crate) fn click(&mut self, selector: &str) {
        let place = self.value(&format!(
            "(() => {{
                const element = document.querySelector({});
                element.scrollIntoView({{ block: 'center' }});
                const {{ x, y, width, height }} = element.getBoundingClientRect();
                return [x + width / 2, y + height / 2];
            }})()",
            json!(selector)
        ));
        for kind in ["mousePressed", "mouseReleased"] {
            let at = json!({ "type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1 });
            self.call("Input.dispatchMouseEvent", &at);
        }
    }

    /// What the page complained about since it was asked last: errors, warnings, what its policy blocked, dialogs, and whatever
    /// it asked for beside itself.
    pub(crate) fn complaints(&mut self) -> Vec<String> {
        // Whatever is on its way is there before the answer.
        self.value("new Promise((done) => setTimeout(done, 50))");
        let is_complaint = |event: &Value| match event["method"].as_str().unwrap_or_default() {
            "Runtime.exceptionThrown"
            | "Runtime.consoleAPICalled"
            | "Log.entryAdded"
            | "Page.javascriptDialogOpening" => true,
            "Network.requestWillBeSent" => event["params"]["type"] != "Document",
            _ => false,
        };
        let events = std::mem::take(&mut self.events);
        events.iter().filter(|event| is_complaint(event)).map(ToString::to_string).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // With its page gone by the protocol all its processes end; if not, this one is ended.
        let close = b"{\"id\":0,\"method\":\"Browser.close\"}\0";
        let has_asked = self.to.write_all(close).is_ok();
        let begin = Instant::now();
        while has_asked && begin.elapsed() < Duration::from_secs(5) {
            if !matches!(self.process.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// Reads messages, each of which ends in a zero byte.
fn messages(output: File) -> Receiver<Value> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut output = BufReader::new(output);
        let mut bytes = Vec::new();
        while output.read_until(0, &mut bytes).is_ok_and(|read| read > 0) {
            bytes.pop();
            let Ok(message) = serde_json::from_slice(&bytes) else { return };
            if sender.send(message).is_err() {
                return;
            }
            bytes.clear();
        }
    });
    receiver
}

/// The first of the programs in the folders of `PATH`.
fn program() -> Option<PathBuf> {
    let folders: Vec<PathBuf> = env::split_paths(&env::var_os("PATH")?).collect();
    let paths =
        PROGRAMS.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    paths.into_iter().find(|path| path.is_file())
}
