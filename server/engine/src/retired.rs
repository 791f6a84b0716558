//! Stored fields of earlier versions that decided bits or the layout of state. Every reader of stored JSON refuses JSON
//! with such a field. If the field were ignored, the job would continue with other bits.

use longshore_proto::{Fault, FaultKind};
use serde::Deserialize;

/// The places of retired fields in a header, a manifest or a record.
#[derive(Deserialize)]
struct Retired {
    spec: Option<RetiredSpec>,
    commit: Option<RetiredCommit>,
    /// Record of the tier `nvme`.
    record: Option<RetiredRecord>,
}

#[derive(Deserialize)]
struct RetiredRecord {
    commit: Option<RetiredCommit>,
}

#[derive(Deserialize)]
struct RetiredSpec {
    #[serde(default)]
    worker_local: bool,
    #[serde(default)]
    unchecked: bool,
}

#[derive(Deserialize)]
struct RetiredCommit {
    /// Present in every commit of an earlier version, mostly as 0.
    compensation: Option<String>,
}

/// Refuses JSON with a retired field. JSON that does not parse is left to its reader.
pub(crate) fn check(json: &[u8]) -> Result<(), Fault> {
    let Ok(Retired { spec, commit, record }) = serde_json::from_slice(json) else { return Ok(()) };
    if spec.is_some_and(|spec| spec.worker_local) {
        return Err(refused("spec.worker_local", "true".into(), "false"));
    }
    let commit = commit.or_else(|| record?.commit);
    match commit.and_then(|commit| commit.compensation).filter(|c| c.parse::<f64>() != Ok(0.0)) {
        Some(compensation) => Err(refused("commit.compensation", compensation, "0")),
        None => Ok(()),
    }
}

/// Refuses the header of a job that did not check gradients. A checkpoint of such a job can be restored into a job that
/// checks gradients.
pub(crate) fn check_header(json: &[u8]) -> Result<(), Fault> {
    match serde_json::from_slice(json) {
        Ok(Retired { spec: Some(RetiredSpec { unchecked: true, .. }), .. }) => {
            let limit = "false: gradients are always checked";
            let remedy = "restore a checkpoint of the job into a fresh state directory; this folder can only be removed";
            Err(Fault::new(FaultKind::Precondition, "spec.unchecked", "true", limit, remedy))
        }
        _ => Ok(()),
    }
}

fn refused(field: &str, value: String, limit: &str) -> Fault {
    let limit = format!("{limit}: look-ahead is the one correction of a delay");
    let remedy = "restore a checkpoint of the job with release 0.1 and --correction look-ahead, make another checkpoint, \
                  and restore that one";
    Fault::new(FaultKind::Precondition, field, value, limit, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retired_field_is_refused_by_name_only_where_it_had_an_effect() {
        for fine in [
            r#"{"spec":{"name":"run"},"commit":null}"#,
            r#"{"spec":{"worker_local":false},"commit":{"compensation":"0.0"}}"#,
            r#"{"version":3,"commit":{"look_ahead":["0.1"],"compensation":"0.0"}}"#,
        ] {
            assert_eq!(check(fine.as_bytes()), Ok(()), "{fine}");
        }
        let unchecked = br#"{"store":7,"spec":{"unchecked":true}}"#;
        assert_eq!(check(unchecked), Ok(()), "a checkpoint's");
        let fault = check_header(unchecked).unwrap_err();
        assert!(fault.field == "spec.unchecked" && fault.remedy.contains("checkpoint"), "{fault}");
        for (json, field) in [
            (r#"{"store":7,"spec":{"worker_local":true}}"#, "spec.worker_local"),
            (r#"{"version":3,"commit":{"compensation":"0.5"}}"#, "commit.compensation"),
            (r#"{"store":7,"record":{"commit":{"compensation":"1.0"}}}"#, "commit.compensation"),
        ] {
            let fault = check(json.as_bytes()).unwrap_err();
            assert!(fault.field == field && fault.remedy.contains("look-ahead"), "{fault}");
        }
    }
}
