//! Parameters that steps leave out for lack of a gradient, with the number of steps each missed. A parameter of
//! uploaded state may have missed steps, too.

use std::iter::Peekable;

use crate::{fault::Fault, job::JobSpec};

/// A parameter that at least one step left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LeftOut {
    /// Index among the job's parameters.
    pub param: u32,
    /// Applied steps without the parameter, including the commit's own. Adam's t for the parameter is the job's
    /// `applied` minus `steps`.
    pub steps: u64,
    /// The commit's own step leaves the parameter out.
    pub now: bool,
}

/// Returns the `left_out` of the next commit. `before` is the previous commit's list; `without` holds the parameters
/// without a gradient. Both are ascending. A skipped step changes nothing and repeats `before`.
pub fn advance(before: &[LeftOut], without: &[u32], skip: bool) -> Vec<LeftOut> {
    if skip {
        return before.to_vec();
    }
    let (mut known, mut without) = (before.iter().peekable(), without.iter().copied().peekable());
    let mut advanced = Vec::with_capacity(before.len());
    while let Some(param) = next(&mut known, &mut without) {
        let steps = known.next_if(|known| known.param == param).map_or(0, |known| known.steps);
        let now = without.next_if_eq(&param).is_some();
        advanced.push(LeftOut { param, steps: steps + u64::from(now), now });
    }
    advanced
}

/// Returns the smaller of the next parameters of both lists.
fn next<'a>(
    known: &mut Peekable<impl Iterator<Item = &'a LeftOut>>,
    without: &mut Peekable<impl Iterator<Item = u32>>,
) -> Option<u32> {
    match (known.peek().map(|known| known.param), without.peek().copied()) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

/// Returns the parameters that the commit's own step leaves out, ascending.
pub fn now(left_out: &[LeftOut]) -> impl Iterator<Item = u32> {
    left_out.iter().filter(|left_out| left_out.now).map(|left_out| left_out.param)
}

/// Checks a commit's list against the number of parameters. The server separately checks that the list follows from the
/// commit before. `may` permits the commit's step to leave parameters out.
pub(crate) fn check(left_out: &[LeftOut], params: usize, may: bool) -> Result<(), Fault> {
    let remedy = "make it from the commit before and from Training.Stats";
    check_list(left_out, params, ("commit.left_out", remedy))?;
    match left_out.iter().position(|left_out| left_out.now && !may) {
        Some(index) => {
            let field = format!("commit.left_out[{index}].now");
            Err(Fault::invalid(field, 1, "false for a job opened without leave_out", remedy))
        }
        None => Ok(()),
    }
}

/// Checks the list uploaded with a job's initial state. `applied` is the number of updates that made the state, None
/// for weights alone.
pub fn check_uploaded(left_out: &[LeftOut], spec: &JobSpec, applied: Option<u64>) -> Result<(), Fault> {
    let remedy = "name the parameters that fewer updates made than `applied`, with how many fewer";
    check_list(left_out, spec.params.len(), ("left_out", remedy))?;
    let most = applied.unwrap_or(0);
    for (index, &LeftOut { steps, now, .. }) in left_out.iter().enumerate() {
        if steps > most {
            let limit = format!("at most {most}, the updates that made the state (`applied`)");
            return Err(Fault::invalid(format!("left_out[{index}].steps"), steps, limit, remedy));
        }
        if now {
            let limit = "false: an upload is no step";
            return Err(Fault::invalid(format!("left_out[{index}].now"), 1, limit, remedy));
        }
    }
    Ok(())
}

fn check_list(left_out: &[LeftOut], params: usize, (field, remedy): (&str, &str)) -> Result<(), Fault> {
    let refused = |index: usize, name: &str, value: u64, limit: String| {
        Err(Fault::invalid(format!("{field}[{index}].{name}"), value, limit, remedy))
    };
    for (index, &LeftOut { param, steps, .. }) in left_out.iter().enumerate() {
        let least = index.checked_sub(1).map_or(0, |before| u64::from(left_out[before].param) + 1);
        if !(least..params as u64).contains(&param.into()) {
            return refused(
                index,
                "param",
                param.into(),
                format!("in {least}..{}, in ascending order", params),
            );
        }
        if steps == 0 {
            return refused(index, "steps", steps, "at least 1".into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(param: u32, steps: u64, now: bool) -> LeftOut {
        LeftOut { param, steps, now }
    }

    #[test]
    fn counts_follow_from_those_before() {
        let first = advance(&[], &[1, 4], false);
        assert_eq!(first, [left(1, 1, true), left(4, 1, true)]);
        let second = advance(&first, &[0, 4], false);
        assert_eq!(second, [left(0, 1, true), left(1, 1, false), left(4, 2, true)]);
        assert_eq!(advance(&second, &[2], true), second, "a step that overflowed");
        assert_eq!(now(&second).collect::<Vec<_>>(), [0, 4]);
        assert_eq!(advance(&second, &[], false), [left(0, 1, false), left(1, 1, false), left(4, 2, false)]);
    }
}
