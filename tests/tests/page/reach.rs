//! The page with a keyboard alone, and its contrast.

use longshore_tests::{
    browser::Browser,
    http::{self, FLAGS},
    server::{Longshored, ServerOptions},
    train::Train,
};
use serde_json::{Value, json};

use super::{browser, open};

/// Returns a server whose only job has ended.
fn trained() -> Longshored {
    let server = ServerOptions::new().args(FLAGS).start();
    Train::new(7).servers(&[server.address().to_string()]).run();
    server
}

/// Describes the focused element in words.
fn focused(browser: &mut Browser) -> String {
    let focused = browser.eval(
        "(() => { const one = document.activeElement; \
         return one.tagName === 'FIGURE' ? 'chart ' + one.querySelector('h3').textContent : `${one.tagName.toLowerCase()} ${one.textContent}`.slice(0, 60); })()",
    );
    focused.as_str().unwrap_or_default().to_string()
}

/// Waits until the page is redrawn from the server's answer.
fn drawn_again(browser: &mut Browser) {
    browser.eval("window.drawnBefore = document.querySelector('article'); 0");
    browser.until(
        "the page to be drawn again",
        "drawnBefore && drawnBefore !== document.querySelector('article')",
    );
}

/// Checks that the focus is visible.
#[track_caller]
fn is_outlined(browser: &mut Browser) {
    let outline = "getComputedStyle(document.activeElement).outlineStyle + ' ' + getComputedStyle(document.activeElement).outlineWidth";
    assert_eq!(browser.eval(outline), "solid 2px", "{}", focused(browser));
}

#[test]
fn all_of_it_is_reached_by_keys_and_no_redraw_takes_the_focus() {
    let Some(mut browser) = browser() else { return };
    let server = trained();
    open(&mut browser, &http::address(&server));
    browser.until("the job's charts", "document.querySelectorAll('article figure').length > 6");
    let charts =
        browser.eval("[...document.querySelectorAll('article h3')].map((one) => 'chart ' + one.textContent)");
    let charts = charts.as_array().unwrap().iter().map(|title| title.as_str().unwrap().to_string());
    let expected: Vec<String> = ["summary where memory and drives go".to_string()]
        .into_iter()
        .chain(charts)
        .chain(["summary 1 of 1 ranks", "a metrics", "a status.json", "a readyz"].map(str::to_string))
        .collect();
    let mut seen = Vec::new();
    for at in 0..expected.len() {
        browser.press("Tab");
        // A redraw between two keys must keep the focus.
        if at % 4 == 1 {
            drawn_again(&mut browser);
        }
        is_outlined(&mut browser);
        seen.push(focused(&mut browser));
    }
    assert_eq!(seen, expected);

    // Redraws keep opened parts open and closed parts closed, with the focus on them.
    let isolated = "document.querySelector('details[data-keep=room]').open";
    browser.eval("document.querySelector('details[data-keep=room] summary').focus(); 0");
    for is_open in [true, false] {
        browser.press("Enter");
        assert_eq!(browser.eval(isolated), is_open);
        drawn_again(&mut browser);
        assert_eq!((browser.eval(isolated), focused(&mut browser)), (is_open.into(), expected[0].clone()));
    }
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// Least contrast by WCAG 2.2, level AA: 4.5 for text (1.4.3), and 3 for other essential marks (1.4.11).
const TEXT: f64 = 4.5;
const MARK: f64 = 3.0;

/// A script that returns each visible pair of colours with its element: text on its background, and lines,
/// dots and bars.
const PAIRS: &str = r"(() => {
    const behind = (one) => {
        for (; one; one = one.parentElement) {
            const colour = getComputedStyle(one).backgroundColor;
            if (colour !== 'rgba(0, 0, 0, 0)') return colour;
        }
        return 'none';
    };
    const pairs = new Map();
    const add = (kind, of, front, back) => pairs.set(`${kind} ${front} ${back}`, [kind, of, front, back]);
    for (const one of document.querySelectorAll('body *')) {
        const says = [...one.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
        if (says && one.getClientRects().length) add('text', `${one.tagName} ${one.className}`, getComputedStyle(one).color, behind(one));
    }
    for (const path of document.querySelectorAll('svg path')) add('mark', 'line', getComputedStyle(path).stroke, behind(path));
    for (const dot of document.querySelectorAll('svg circle')) add('mark', 'dot', getComputedStyle(dot).fill, behind(dot));
    for (const bar of document.querySelectorAll('.bar span')) add('mark', 'bar', getComputedStyle(bar).backgroundColor, behind(bar.parentElement));
    for (const one of document.querySelectorAll('.trouble')) add('mark', 'edge', getComputedStyle(one).borderLeftColor, behind(one));
    return [...pairs.values()];
})()";

/// Returns the relative luminance of a colour in a browser's form, such as `rgb(11, 98, 168)`.
fn luminance(colour: &str) -> f64 {
    let numbers = colour.strip_prefix("rgb(").and_then(|rest| rest.strip_suffix(')'));
    let numbers = numbers.unwrap_or_else(|| panic!("not an opaque colour: {colour}"));
    let linear = |part: &str| {
        let part = part.trim().parse::<f64>().expect("a number") / 255.0;
        if part <= 0.04045 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
    };
    let parts: Vec<f64> = numbers.split(',').map(linear).collect();
    0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
}

fn contrast(front: &str, back: &str) -> f64 {
    let (front, back) = (luminance(front), luminance(back));
    (front.max(back) + 0.05) / (front.min(back) + 0.05)
}

/// Returns the pairs with too little contrast, and the number of pairs seen.
fn too_little(browser: &mut Browser) -> (Vec<String>, usize) {
    let pairs = browser.eval(PAIRS);
    let pairs = pairs.as_array().unwrap();
    let judged = pairs.iter().filter_map(|pair| {
        let part = |at: usize| pair[at].as_str().unwrap();
        let found = contrast(part(2), part(3));
        let least = if part(0) == "text" { TEXT } else { MARK };
        (found < least).then(|| format!("{found:.2} of {pair}"))
    });
    (judged.collect(), pairs.len())
}

#[test]
fn contrast_is_as_it_should_be_by_day_and_by_night() {
    assert!((contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") - 21.0).abs() < 1e-9);
    let Some(mut browser) = browser() else { return };
    let server = trained();
    open(&mut browser, &http::address(&server));
    browser.until("the job's charts", "document.querySelectorAll('svg path').length > 6");
    // All possible elements at once: each state, each kind of trouble, and a skipped step.
    browser.eval(
        "draw = () => {}; turn = () => {}; \
         for (const state of ['training', 'idle', 'paused', 'loading', 'away', 'failed']) \
           document.querySelector('.head').append(made('span', { class: `state ${state}` }, state)); \
         say([trouble('one', { remedy: 'do' }), trouble('another', { warn: true, since: 0 })], 5000); \
         document.querySelector('.charts').append(chart('skipped', [1, 2, 3].map((step) => ({ step, skipped: step === 2 })), ({ step }) => step, number)); \
         document.querySelector('details[data-keep=room]').open = true; at('idle').hidden = false; 0",
    );
    let mut backs = Vec::new();
    for scheme in ["light", "dark"] {
        browser.colours(scheme);
        let (found, pairs) = too_little(&mut browser);
        assert_eq!(found, Vec::<String>::new(), "{scheme}");
        assert!(pairs >= 12, "{scheme}: {pairs}");
        backs.push(browser.eval("getComputedStyle(document.body).backgroundColor"));
    }
    let [day, night] = [&backs[0], &backs[1]].map(|back| luminance(back.as_str().unwrap()));
    assert!(day > 0.8 && night < 0.05, "{backs:?}");
    // The check itself works: a typical grey has too little contrast and is found.
    browser.eval("document.documentElement.style.setProperty('--quiet', '#6a6d72'); 0");
    let (found, _) = too_little(&mut browser);
    assert!(!found.is_empty() && found.iter().all(|pair| pair.contains("106, 109, 114")), "{found:?}");
    assert_eq!(json!(browser.complaints()), Value::Array(Vec::new()));
}
