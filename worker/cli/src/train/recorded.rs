//! What a run leaves on each commit of the settings that decide its bits, so that the process which goes on from there can say
//! what it does otherwise.

use serde_json::{Value, json};

use super::Settings;

/// Where each setting stands in what is recorded, and the flag that users know it by.
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

/// The settings that must stay the same for a run that goes on to have the bits of one that was never interrupted.
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

/// What differs from the settings recorded in `before`, in sentences. It is said and not refused: to train for more steps, or with
/// another delay from now on, is a wish like any other, and only the user knows whether it was meant.
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

/// A setting of earlier versions, where it had an effect.
fn newer_from(before: &Value) -> Option<String> {
    let number = |place| before.pointer(place).and_then(Value::as_u64);
    let newer = number("/delay/newer_from").zip(number("/micro_steps"));
    let (first, _) = newer.filter(|(first, micro_steps)| first < micro_steps)?;
    Some(format!(
        "this job was trained so far with --newer-from {first}, and goes on without it: its bits are those of neither"
    ))
}

/// A setting as its flag takes it. None where it means nothing, as a delay's settings do in an exact job.
fn given(state: &Value, place: &str) -> Option<String> {
    match (place, state.pointer(place)) {
        ("/delay/steps", None) => Some("0".into()),
        (_, Some(Value::Bool(on_worker))) => Some(if *on_worker { "worker" } else { "servers" }.into()),
        (_, Some(Value::String(text))) => Some(text.clone()),
        (_, found) => found.map(Value::to_string),
    }
}
