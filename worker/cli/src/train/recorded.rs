//! Records on each commit the settings that decide a run's bits. A process that continues the run reports
//! different settings, and a rank with other settings than rank 0's ends.

use serde_json::{Value, json};

use super::{Flags, Settings};

/// The JSON pointer of each setting in the record, and its flag.
const FLAGS: [(&str, &str); 17] = [
    ("/data", "--data"),
    ("/seed", "--seed"),
    ("/heads", "--heads"),
    ("/batch", "--batch"),
    ("/lr", "--lr"),
    ("/lr_warmup_steps", "--lr-warmup-steps"),
    ("/lr_floor", "--lr-floor"),
    ("/weight_decay", "--weight-decay"),
    ("/momentum", "--momentum"),
    ("/clip", "--clip"),
    ("/micro_steps", "--micro-steps"),
    ("/accumulate_on_worker", "--accumulate"),
    ("/steps", "--steps"),
    ("/delay/steps", "--delay"),
    ("/delay/warmup_steps", "--warmup-steps"),
    ("/delay/correction", "--correction"),
    ("/delay/eval_every", "--eval-every"),
];

/// Returns the settings that must stay the same for a continued run to have the bits of an uninterrupted one.
/// `text` stands for the training text, see [`Corpus::digest`](super::text::Corpus::digest).
pub(super) fn state(settings: &Settings, text: &str) -> Vec<u8> {
    of(settings, text).to_string().into_bytes()
}

fn of(settings: &Settings, text: &str) -> Value {
    let Flags { seed, batch, micro_steps, steps, lr, weight_decay, .. } = settings.flags;
    let Flags { momentum, lr_warmup_steps, lr_floor, clip, .. } = settings.flags;
    // Numbers with fractions are text, which is read back to the bit.
    let mut state = json!({
        "data": text, "seed": seed, "heads": settings.model.heads, "batch": batch, "micro_steps": micro_steps,
        "accumulate_on_worker": settings.accumulates_on_worker(), "steps": steps, "lr": lr.to_string(),
        "lr_warmup_steps": lr_warmup_steps, "lr_floor": lr_floor.to_string(), "weight_decay": weight_decay.to_string(),
        "momentum": momentum.to_string(), "clip": clip.to_string(),
    });
    if settings.flags.delay > 0 {
        let Flags { delay, warmup_steps, correction, eval_every, .. } = settings.flags;
        state["delay"] = json!({
            "steps": delay, "warmup_steps": warmup_steps, "correction": correction.unwrap_or_default().to_string(),
            "eval_every": eval_every,
        });
    }
    state
}

/// Returns the differences from the settings recorded in `before`, in sentences. A difference is reported, not
/// refused: a user may want more steps or another delay from now on.
pub(super) fn differences(before: &[u8], settings: &Settings, text: &str) -> Vec<String> {
    let Ok(before) = serde_json::from_slice::<Value>(before) else {
        return vec!["this job was trained so far by another program, whose settings are not known".into()];
    };
    let said = |[before, now]: [String; 2]| {
        format!(
            "this job was trained so far with {before}, and goes on with {now}: its bits are those of neither"
        )
    };
    differing(&before, &of(settings, text)).into_iter().map(said).collect()
}

/// Refuses settings that differ from rank 0's in `state`: batches of both ranks are summed into one gradient.
pub(super) fn check_rank(rank: u32, state: &[u8], settings: &Settings, text: &str) -> anyhow::Result<()> {
    let Ok(of_rank_0) = serde_json::from_slice::<Value>(state) else { return Ok(()) };
    let Some([theirs, ours]) = differing(&of_rank_0, &of(settings, text)).into_iter().next() else {
        return Ok(());
    };
    anyhow::bail!(
        "rank 0 trains with {theirs}, and rank {rank} with {ours}: start every rank with the same settings"
    )
}

fn differing(one: &Value, other: &Value) -> Vec<[String; 2]> {
    let differs = |(place, flag): (&str, &str)| {
        let (one, other) = (given(one, place)?, given(other, place)?);
        (one != other).then(|| [one, other].map(|value| format!("{flag} {value}")))
    };
    FLAGS.into_iter().filter_map(differs).collect()
}

/// Returns a setting in its flag's format. None if the setting means nothing, such as a delay's settings in an exact
/// job.
fn given(state: &Value, place: &str) -> Option<String> {
    match (place, state.pointer(place)) {
        ("/delay/steps", None) => Some("0".into()),
        (_, Some(Value::Bool(on_worker))) => Some(if *on_worker { "worker" } else { "servers" }.into()),
        (_, Some(Value::String(text))) => Some(text.clone()),
        (_, found) => found.map(Value::to_string),
    }
}
