//! An HTTP client of a server's pages and metrics.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use serde_json::Value;

use crate::server::Longshored;

/// Longest wait for an answer. A longer wait fails the test.
const DEADLINE: Duration = Duration::from_secs(30);

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0";

/// Flags that make a server serve HTTP on a free port of 127.0.0.1.
pub const FLAGS: [&str; 2] = ["--http", "127.0.0.1:0"];

/// Returns the HTTP address that a server started with [`FLAGS`] prints.
pub fn address(server: &Longshored) -> String {
    let urls: Vec<String> =
        server.log().iter().filter_map(|line| Some(line["fields"]["url"].as_str()?.to_string())).collect();
    let url = urls.last().expect("the server says where its status page is");
    let host = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    host.and_then(|rest| rest.strip_suffix('/')).expect("a URL").to_string()
}

/// Returns the status code, headers and body of `GET path`.
pub fn get(address: &str, path: &str) -> (u16, String, String) {
    ask(address, &format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"))
}

/// Sends any request. Returns the status code, headers and body.
pub fn ask(address: &str, request: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).expect("the HTTP address takes connections");
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap_or_else(|error| panic!("{error} after {answer:?}"));
    parts(&answer)
}

/// Splits an answer into status code, headers and body.
pub fn parts(answer: &str) -> (u16, String, String) {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head in {answer:?}"));
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    (code.unwrap_or_else(|| panic!("no code in {head:?}")), head.to_lowercase(), body.to_string())
}

pub fn json(address: &str, path: &str) -> Value {
    let (code, _, body) = get(address, path);
    assert_eq!(code, 200, "{body}");
    serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error} in {body}"))
}

/// Returns the values of `/metrics`, keyed by name and labels, such as `longshore_jobs{state="paused"}`. Checks the
/// text's form: a sample belongs to the family named before it, no sample repeats, and the text ends as OpenMetrics
/// requires.
pub fn metrics(address: &str) -> BTreeMap<String, f64> {
    let request =
        format!("GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAccept: {OPEN_METRICS}\r\n\r\n");
    let (code, head, body) = ask(address, &request);
    assert_eq!(code, 200, "{body}");
    assert!(head.contains(&format!("content-type: {OPEN_METRICS}")), "{head}");
    let body = body.strip_suffix("# EOF\n").unwrap_or_else(|| panic!("no end in {body}"));
    let (mut family, mut samples) = (String::new(), BTreeMap::new());
    for line in body.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            family = comment.split(' ').nth(1).expect("a family's name").to_string();
            continue;
        }
        assert!(!family.is_empty() && line.starts_with(&family), "{line} in family {family}");
        let (sample, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no value in {line}"));
        let value = value.parse().unwrap_or_else(|error| panic!("{error} in {line}"));
        assert!(samples.insert(sample.to_string(), value).is_none(), "{sample} comes twice");
    }
    samples
}
