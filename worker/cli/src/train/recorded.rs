//! Records on each commit the settings that decide a run's bits. A process that continues the run reports
//! different settings.

use serde_json::{Value, json};

use super::Settings;

/// The JSON pointer of each setting in the record, and its flag.
const FLAGS: [(&str, &str); 8] = [
    ("/seed", "--seed"),
    ("/batch", "--batch"),
    ("/micro_steps", "--micro-steps"),
    ("/accumulate_on_worker", "--accumulate"),
    ("/steps", "--steps"),
    ("/delay/steps", "--delay"),
    ("/delay/warmup_steps", "--warmup-steps"),
    ("/delay/correction", "--correction"),
];

/// Returns the settings that must stay the same for a continued run to have the bits of an uninterrupted one.
pub(super) fn state(settings: &Settings) -> Vec<u8> {
    of(settings).to_string().into_bytes()
}

fn of(settings: &Settings) -> Value {
    let Settings { seed, batch, micro_steps, accumulate_on_worker, steps, .. } = *settings;
    let mut state = json!({
        "seed": seed, "batch": batch, "micro_steps": micro_steps, "accumulate_on_worker": accumulate_on_worker,
        "steps": steps,
    });
    if settings.delay > 0 {
        let Settings { delay, delay_warmup_steps, correction, .. } = *settings;
        state["delay"] = json!({
            "steps": delay, "warmup_steps": delay_warmup_steps, "correction": correction.to_string(),
        });
    }
    state
}

/// Returns the differences from the settings recorded in `before`, in sentences. A difference is reported, not
/// refused: a user may want more steps or another delay from now on.
pub(super) fn differences(before: &[u8], settings: &Settings) -> Vec<String> {
    let Ok(before) = serde_json::from_slice::<Value>(before) else {
        return vec!["this job was trained so far by another program, whose settings are not known".into()];
    };
    let now = of(settings);
    let said = |(place, flag): (&str, &str)| {
        let (before, now) = (given(&before, place)?, given(&now, place)?);
        (before != now).then(|| {
            format!(
                "this job was trained so far with {flag} {before}, and goes on with {flag} {now}: its bits are those of neither"
            )
        })
    };
    FLAGS.into_iter().filter_map(said).chain(newer_from(&before)).collect()
}

/// Reports a setting of earlier versions, if it had an effect.
fn newer_from(before: &Value) -> Option<String> {
    let number = |place| before.pointer(place).and_then(Value::as_u64);
    let newer = number("/delay/newer_from").zip(number("/micro_steps"));
    let (first, _) = newer.filter(|(first, micro_steps)| first < micro_steps)?;
    Some(format!(
        "this job was trained so far with --newer-from {first}, and goes on without it: its bits are those of neither"
    ))
}

/// Returns a setting in its flag's format. None if it means nothing, such as a delay's settings in an exact job.
fn given(state: &Value, place: &str) -> Option<String> {
    match (place, state.pointer(place)) {
        ("/delay/steps", None) => Some("0".into()),
        (_, Some(Value::Bool(on_worker))) => Some(if *on_worker { "worker" } else { "servers" }.into()),
        (_, Some(Value::String(text))) => Some(text.clone()),
        (_, found) => found.map(Value::to_string),
    }
}
