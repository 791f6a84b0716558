//! Drives headless Chromium by DevTools over a pipe: viewport size, fetched addresses, console complaints.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Write},
    process::Command,
    sync::mpsc::{self, Receiver},
    thread,
};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    conformance::cluster::eventually,
    process::{DEADLINE, Process},
};

/// A browser with one page, killed on drop.
pub struct Browser {
    commands: File,
    messages: Receiver<Value>,
    /// A byte written to this pipe ends the thread that reads messages.
    wake: File,
    sent: u64,
    session: Option<String>,
    events: Vec<Value>,
    _process: Process,
    _folder: TempDir,
}

impl Browser {
    /// Starts Chromium. Returns None where Debian's package `chromium` is not installed.
    pub fn start() -> Option<Browser> {
        Command::new("chromium").arg("--version").output().ok()?;
        let folder = TempDir::new().expect("a temporary folder");
        let pipe = |name: &str| {
            let path = folder.path().join(name);
            mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a named pipe");
            // Opened for reading and writing: opening one end alone would block until the other end is open.
            let file = OpenOptions::new().read(true).write(true).open(&path).expect("the pipe");
            (path, file)
        };
        let ((to, commands), (from, mut answers)) = (pipe("commands"), pipe("answers"));
        let mut shell = Command::new("sh");
        shell.args(["-c", "exec chromium \"$@\" 3<\"$0\" 4>\"$FROM\""]).arg(&to).env("FROM", &from);
        shell.args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]);
        shell.args(["--disable-background-networking", "--remote-debugging-pipe"]);
        shell.arg(format!("--user-data-dir={}", folder.path().join("profile").display()));
        let process = Process::start("chromium", &mut shell);
        let wake = answers.try_clone().expect("another descriptor");
        let (sender, messages) = mpsc::channel();
        thread::spawn(move || {
            let (mut text, mut part) = (Vec::new(), [0; 65536]);
            while let Ok(count) = answers.read(&mut part) {
                text.extend_from_slice(&part[..count]);
                while let Some(end) = text.iter().position(|&byte| byte == 0) {
                    let message: Vec<u8> = text.drain(..=end).collect();
                    let Ok(message) = serde_json::from_slice(&message[..end]) else { return };
                    if sender.send(message).is_err() {
                        return;
                    }
                }
            }
        });
        let (sent, session, events) = (0, None, Vec::new());
        let mut browser =
            Browser { commands, messages, wake, sent, session, events, _process: process, _folder: folder };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attached = json!({"targetId": target["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", attached);
        browser.session = attached["sessionId"].as_str().map(str::to_string);
        for domain in ["Runtime", "Log", "Network", "Page"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        // Focus emulation: a headless page without a window would not have the focus.
        browser.call("Emulation.setFocusEmulationEnabled", json!({"enabled": true}));
        Some(browser)
    }

    /// Opens a page and forgets the events of the previous one.
    pub fn open(&mut self, url: &str) {
        self.events.clear();
        let opened = self.call("Page.navigate", json!({"url": url}));
        assert_eq!(opened.get("errorText"), None, "{opened}");
        self.until("the page to be loaded", "document.readyState === 'complete'");
    }

    /// Sets the viewport size. A width below 600 emulates a phone.
    pub fn size(&mut self, width: u32, height: u32) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", size);
        self.until(
            "the page's new size",
            &format!("innerWidth === {width} || document.documentElement.scrollWidth > {width}"),
        );
    }

    /// Emulates the system's colour scheme, `light` or `dark`.
    pub fn colours(&mut self, scheme: &str) {
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", json!({"features": features}));
        self.until("the page's colours", &format!("matchMedia('(prefers-color-scheme: {scheme})').matches"));
    }

    /// Presses Tab or Enter.
    ///
    /// # Panics For any other key.
    pub fn press(&mut self, key: &str) {
        let (code, text) = match key {
            "Tab" => (9, None),
            "Enter" => (13, Some("\r")),
            _ => panic!("{key}: only Tab and Enter are known"),
        };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code});
            if let (Some(text), "keyDown") = (text, kind) {
                event["text"] = json!(text);
            }
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// Evaluates a JavaScript expression in the page, and awaits it if it is a promise.
    pub fn eval(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.call("Runtime.evaluate", asked);
        assert_eq!(answer.get("exceptionDetails"), None, "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    pub fn until(&mut self, what: &str, expression: &str) {
        eventually(what, || (self.eval(expression) == true).then_some(()));
    }

    /// Returns the page's visible text.
    pub fn text(&mut self) -> String {
        self.eval("document.body.innerText").as_str().unwrap_or_default().to_string()
    }

    /// Returns a PNG image of the page, cut off at `most` pixels of height.
    pub fn image(&mut self, most: u64) -> Vec<u8> {
        let [width, height] =
            ["innerWidth", "Math.ceil(document.body.getBoundingClientRect().bottom + scrollY)"]
                .map(|of| self.eval(of).as_u64().expect("a size"));
        let clip = json!({"x": 0, "y": 0, "width": width, "height": height.min(most), "scale": 1});
        let asked = json!({"format": "png", "captureBeyondViewport": true, "clip": clip});
        decoded(self.call("Page.captureScreenshot", asked)["data"].as_str().expect("an image"))
    }

    /// Returns exceptions, and errors and warnings of the page's console.
    pub fn complaints(&mut self) -> Vec<String> {
        self.eval("0");
        let is_one =
            |event: &&Value| match event["method"].as_str() {
                Some("Runtime.exceptionThrown") => true,
                Some("Runtime.consoleAPICalled") => ["error", "warning", "assert"]
                    .contains(&event["params"]["type"].as_str().unwrap_or_default()),
                Some("Log.entryAdded") => ["error", "warning"]
                    .contains(&event["params"]["entry"]["level"].as_str().unwrap_or_default()),
                _ => false,
            };
        self.events.iter().filter(is_one).map(Value::to_string).collect()
    }

    /// Returns the addresses that the page has fetched.
    pub fn fetched(&self) -> Vec<String> {
        let sent = |event: &&Value| event["method"] == "Network.requestWillBeSent";
        let url = |event: &Value| event["params"]["request"]["url"].as_str().map(str::to_string);
        self.events.iter().filter(sent).filter_map(url).collect()
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.sent += 1;
        let mut message = json!({"id": self.sent, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.commands.write_all(format!("{message}\0").as_bytes()).expect("chromium takes commands");
        loop {
            let answer = self.messages.recv_timeout(DEADLINE);
            let mut answer = answer.unwrap_or_else(|error| panic!("no answer to {method}: {error}"));
            if answer["id"] == self.sent {
                assert_eq!(answer.get("error"), None, "{method}: {answer}");
                return answer["result"].take();
            }
            self.events.push(answer);
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // An empty message is not a DevTools message, and ends the thread.
        let _ = self.wake.write_all(&[0]);
    }
}

/// Decodes base64.
fn decoded(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0u32, 0);
    for value in text.bytes().filter_map(digit) {
        (bits, count) = (bits << 6 | u32::from(value), count + 6);
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}
