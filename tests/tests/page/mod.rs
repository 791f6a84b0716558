//! The status page in a browser: faults with remedies, an empty console, no foreign requests, and no overflow
//! at a phone's width.
//!
//! `LONGSHORE_REGENERATE=1 cargo test --release --locked -p longshore-tests --test all page::` renews the
//! screenshots of docs/observe.md.

mod figures;
mod reach;

use std::{env, fs, path::Path, process::Command};

use longshore_tests::{
    binaries,
    browser::Browser,
    command::done,
    conformance::cluster::eventually,
    http::{self, FLAGS},
    process::Process,
    server::{Longshored, ServerOptions},
    skip,
    train::Train,
};
use serde_json::Value;
use tempfile::TempDir;

const WIDE: u32 = 1100;
const PHONE: u32 = 360;
const HEIGHT: u32 = 800;
/// A name of the greatest length, without a place for a line break.
const LONG: &str = "a_name_of_128_characters_which_is_as_many_as_there_may_be_and_has_no_place_where_a_line_would_break_so_that_a_phone_has_no_room_";

/// Returns a browser, or reports the test as skipped.
fn browser() -> Option<Browser> {
    let found = Browser::start();
    if found.is_none() {
        skip::skipped("there is no chromium: install Debian's package chromium");
    }
    found
}

/// Opens the page and waits until it is drawn.
fn open(browser: &mut Browser, http: &str) {
    browser.size(WIDE, HEIGHT);
    browser.open(&format!("http://{http}/"));
    browser.until("the page to be drawn", "!!document.querySelector('#room .bar')");
}

/// Checks that the page has no errors, fetches nothing from elsewhere, and fits every width.
#[track_caller]
fn check(browser: &mut Browser, http: &str) {
    let out = "(width) => [...document.querySelectorAll('body *')].filter((one) => !one.closest('.scroll') && one.getClientRects().length \
               && one.getBoundingClientRect().right > width + 0.5).map((one) => one.outerHTML.slice(0, 200))";
    for width in [PHONE, WIDE] {
        browser.size(width, HEIGHT);
        let scrolled = browser.eval("document.documentElement.scrollWidth").as_u64().unwrap();
        assert_eq!(
            (scrolled, browser.eval(&format!("({out})({width})"))),
            (u64::from(width), Value::Array(Vec::new()))
        );
    }
    assert_eq!(browser.complaints(), Vec::<String>::new());
    let own = format!("http://{http}/");
    let (fetched, data) = (browser.fetched(), "data:");
    assert!(fetched.len() >= 4, "{fetched:?}");
    let elsewhere: Vec<_> =
        fetched.iter().filter(|url| !url.starts_with(&own) && !url.starts_with(data)).collect();
    assert!(elsewhere.is_empty(), "{elsewhere:?}");
}

/// Makes a screenshot for the docs, if `LONGSHORE_REGENERATE` is set.
fn screenshot(browser: &mut Browser, name: &str, (width, most): (u32, u64)) {
    if env::var_os("LONGSHORE_REGENERATE").is_some() {
        browser.size(width, HEIGHT);
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name);
        fs::write(file, browser.image(most)).unwrap();
    }
}

#[track_caller]
fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

fn delete(job: &str, server: &Longshored) {
    done(["delete", "--job", job, "--servers", server.address()]);
}

#[test]
fn it_draws_jobs_that_train_and_wait_and_have_ended() {
    let Some(mut browser) = browser() else { return };
    let root = TempDir::with_prefix("longshore-").unwrap();
    let drive = root.path().join("nvme0");
    fs::create_dir(&drive).unwrap();
    let server = ServerOptions::new().args(["--state-dir", &drive.display().to_string()]).args(FLAGS).start();
    let (http, servers) = (http::address(&server), [server.address().to_string()]);
    open(&mut browser, &http);
    let text = browser.text();
    has(&text, &["0 B of 1.0 GiB reserved by jobs", &format!("drive {}: ", drive.display()), " free of "]);
    // A worker that follows the page's command finds the server.
    has(&text, &[&format!("longshore train --servers {}", server.address())]);
    check(&mut browser, &http);
    screenshot(&mut browser, "page-idle.png", (WIDE, 400));
    screenshot(&mut browser, "page-idle-phone.png", (PHONE, 600));

    Train::new(7).args(["--job", LONG, "--tier", "nvme"]).servers(&servers).run();
    browser.until("the ended job", "document.body.innerText.includes('7, 7 applied')");
    has(
        &browser.text(),
        &[LONG, "\nidle", "gradient norm", "exposed time", "steps 1 to 7", "pushes", "pulls", "updates"],
    );
    browser.eval("document.querySelector('details[data-keep=room]').open = true");
    check(&mut browser, &http);
    delete(LONG, &server);
    browser.until("an empty server", "!document.querySelector('article')");

    let ended = ["--job", "ended"];
    Train::new(7).args(ended).servers(&servers).run();
    let mut pair = Train::new(1_000_000).args(["--world-size", "2"]).servers(&servers);
    pair = pair.args(["--tier", "nvme"]);
    let mut ranks = ["0", "1"].map(|rank| pair.start_with(["--rank", rank]));
    let enough = if env::var_os("LONGSHORE_REGENERATE").is_some() { 600 } else { 20 };
    ranks[0].until_step(enough);
    browser.until("both jobs", "document.querySelectorAll('article').length === 2 && /steps \\d+ to \\d\\d/.test(document.body.innerText)");
    // An ended job must not make the page fetch the other job's steps repeatedly.
    let asked = "wanted().getAll('after').every((of) => Number(of.split(':')[1]) === known.get(of.split(':')[0]).steps.at(-1).step - 2)";
    browser.until(
        "each job's new steps alone to be asked for",
        &format!("wanted().getAll('after').length === 2 && {asked}"),
    );
    delete("ended", &server);
    browser.until(
        "the job that is left",
        "document.querySelectorAll('article').length === 1 && known.size === 1",
    );
    let drawn = "[...document.querySelectorAll('figure')].filter((one) => one.querySelector('path')).map((one) => one.querySelector('h3').innerText).join()";
    let charts = "loss,step time,exposed time,gradient norm,loss scale,learning rate,pushes,pulls,updates";
    browser.until("all charts", &format!("{drawn} === '{charts}'"));
    has(&browser.text(), &["\ntraining", "2 of 2 ranks", "where memory and drives go"]);
    check(&mut browser, &http);
    screenshot(&mut browser, "page.png", (WIDE, 960));

    ranks[1].process.stop();
    let stalled = "document.querySelector('#troubles .since')?.textContent";
    browser.until("the wait", &format!("!!{stalled}"));
    has(
        &browser.text(),
        &[
            "default has decided nothing since ",
            "It waits for ",
            "Remedy: see whether that rank's process runs",
        ],
    );
    // The element stays in place while the time beside it changes, so a screen reader speaks it once.
    browser.eval("window.told = [document.querySelector('#troubles p'), document.querySelector('#troubles .since').textContent]");
    browser.until("the time to go on", &format!("{stalled} !== told[1]"));
    assert_eq!(browser.eval("document.querySelector('#troubles p') === told[0]"), true);
    check(&mut browser, &http);
    screenshot(&mut browser, "page-stalled.png", (WIDE, 520));
    ranks[1].process.go_on();
    browser.until("the job to go on", "!document.querySelector('#troubles p')");
    check(&mut browser, &http);
}

#[test]
fn it_says_which_drive_is_full_and_what_to_do() {
    let Some(mut browser) = browser() else { return };
    let root = TempDir::with_prefix("longshore-").unwrap();
    let Some(mut shell) = with_little_room(root.path()) else {
        return skip::skipped("this user may not mount anything, not even in a namespace of its own");
    };
    shell.arg(binaries::command("longshored").get_program());
    shell.args(["--listen=127.0.0.1:0", "--memory=1GiB", "--log-format=json"]).args(FLAGS);
    let server = Process::start("longshored", shell.arg("--checkpoint-dir").arg(root.path()));
    let said = server.line().unwrap_or_default();
    let address =
        said.strip_prefix("longshored listening on ").unwrap_or_else(|| panic!("{}", server.stderr()));
    let http = eventually("the page's address", || {
        let log = server.stderr();
        Some(log.split_once("http://")?.1.split_once('/')?.0.to_string())
    });
    open(&mut browser, &http);
    let train = Train::new(1_000_000)
        .args(["--checkpoint-every", "30"])
        .servers(&[address.to_string()])
        .allow("checkpoint");
    let mut worker = train.start();
    worker.until_step(if env::var_os("LONGSHORE_REGENERATE").is_some() { 600 } else { 40 });
    let failed = "document.querySelector('#troubles')?.innerText ?? ''";
    browser.until("the failure", &format!("({failed}).includes('The last checkpoint of default failed')"));
    let text = browser.text();
    has(
        &text,
        &[
            "No space left on device",
            "Remedy: put that right: the next checkpoint takes its place",
            "\ntraining",
        ],
    );
    check(&mut browser, &http);
    screenshot(&mut browser, "page-full.png", (WIDE, 700));
    screenshot(&mut browser, "page-full-phone.png", (PHONE, 960));
    worker.kill();
}

/// Returns a shell with a tmpfs of 9 MiB at the folder, in its own mount namespace: room for one checkpoint.
/// None where such namespaces are not permitted.
fn with_little_room(folder: &Path) -> Option<Command> {
    let shell = |script: &str| {
        let mut shell = Command::new("unshare");
        shell
            .args(["--mount", "sh", "-c"])
            .arg(format!("mount -t tmpfs -o size=9m tmpfs \"$0\" && {script}"));
        shell.arg(folder);
        shell
    };
    shell("true").output().is_ok_and(|output| output.status.success()).then(|| shell("exec \"$@\""))
}

#[test]
fn counters_that_begin_again_give_no_negative_speed() {
    let Some(mut browser) = browser() else { return };
    let server = ServerOptions::new().args(FLAGS).start();
    open(&mut browser, &http::address(&server));
    // A server's counters begin anew at second 4, after a restart. No rate may span the restart.
    let speeds = "(() => { \
        const job = (version, bytes) => ({ name: 'x', version, applied: version, pushed_bytes: bytes, pulled_bytes: bytes, \
            update_seconds: bytes / 1e9, update_bytes: 1e6, steps: [] }); \
        const pushed = []; \
        [[0, 10, 5e8], [1000, 12, 6e8], [4000, 12, 0], [5000, 13, 1e8]].forEach(([now, version, bytes]) => { \
            learn(job(version, bytes), now); pushed.push(rate(job(version, bytes))?.pushed ?? null); }); \
        known.delete('x'); return pushed; })()";
    assert_eq!(browser.eval(speeds), serde_json::json!([null, 100_000_000, null, 100_000_000]));
    // A version that was taken back makes the page ask for the steps again.
    let asked = "(() => { \
        const step = (step) => ({ step, seconds: 1, skipped: false, at_ms: 0, pushed_bytes: 0, pulled_bytes: 0, update_seconds: 0 }); \
        const job = (version, steps) => ({ name: 'x', version, applied: 0, pushed_bytes: 0, pulled_bytes: 0, update_seconds: 0, steps }); \
        const asked = []; \
        [[9, [8, 9]], [5, []], [6, [6]]].forEach(([version, steps]) => { \
            learn(job(version, steps.map(step)), 0); asked.push(wanted().toString()); }); \
        known.delete('x'); return asked; })()";
    assert_eq!(browser.eval(asked), serde_json::json!(["after=x%3A7", "", "after=x%3A4"]));
    let complaints = browser.complaints();
    assert!(complaints.is_empty(), "{complaints:?}");
    // An exception while drawing must appear on the console, and not as the server's silence.
    browser.eval("draw = () => { throw new Error('a defect'); }; 0");
    browser.until(
        "what the page says",
        "document.querySelector('#troubles').innerText.includes('a defect of the page')",
    );
    assert!(browser.complaints().iter().any(|said| said.contains("a defect")));
}
