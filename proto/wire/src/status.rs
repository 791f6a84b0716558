//! Conversion of faults to gRPC statuses with google.rpc.ErrorInfo details, and back.

use std::collections::HashMap;

use longshore_proto::fault::{Fault, FaultKind};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::v1;

const DOMAIN: &str = "longshore";

fn code(kind: FaultKind) -> Code {
    match kind {
        FaultKind::Invalid => Code::InvalidArgument,
        FaultKind::Conflict => Code::AlreadyExists,
        FaultKind::NotFound => Code::NotFound,
        FaultKind::Precondition => Code::FailedPrecondition,
        FaultKind::Unauthenticated => Code::Unauthenticated,
        FaultKind::Forbidden => Code::PermissionDenied,
        FaultKind::Fenced => Code::Aborted,
        FaultKind::Exhausted => Code::ResourceExhausted,
        FaultKind::Deadline => Code::DeadlineExceeded,
        FaultKind::Corrupt => Code::DataLoss,
        FaultKind::Unavailable => Code::Unavailable,
        FaultKind::Internal => Code::Internal,
    }
}

/// Returns a status with the fault's sentence as message and its fields as details.
pub fn status(fault: &Fault) -> Status {
    let fault = fault.cut();
    let metadata = HashMap::from([
        ("field".to_string(), fault.field.clone()),
        ("value".to_string(), fault.value.clone()),
        ("limit".to_string(), fault.limit.clone()),
        ("remedy".to_string(), fault.remedy.clone()),
    ]);
    let details = ErrorDetails::with_error_info(fault.kind.name(), DOMAIN, metadata);
    Status::with_error_details(code(fault.kind), fault.to_string(), details)
}

/// Returns the fault inside a status. Only a server's status has our details. Other statuses come from tonic, hyper or
/// h2 at either end, or from a proxy. Their codes reflect the transport rather than a server's decision. Such a status
/// becomes `Unavailable`, which callers retry, except for two codes that retries do not mend.
pub fn fault_from_status(status: &Status, peer: &str) -> Fault {
    if let Some(info) = status.get_details_error_info()
        && info.domain == DOMAIN
        && let Some(kind) = FaultKind::from_name(&info.reason)
    {
        let take = |key: &str| info.metadata.get(key).cloned().unwrap_or_default();
        return Fault {
            kind,
            field: take("field"),
            value: take("value"),
            limit: take("limit"),
            remedy: take("remedy"),
        };
    }
    // A server that speaks TLS answers an unencrypted connection with HTTP/2's INADEQUATE_SECURITY, which tonic reports
    // this way. A proxy's PERMISSION_DENIED has another text.
    if status.code() == Code::PermissionDenied && status.message().starts_with("h2 protocol error") {
        let certificates = "give the folder of certificates (--tls-dir; tls_dir= in Python)";
        return Fault::new(
            FaultKind::Unauthenticated,
            format!("call to {peer}"),
            "not encrypted",
            "made with TLS",
            certificates,
        );
    }
    let (kind, remedy) = match status.code() {
        Code::DeadlineExceeded => {
            (FaultKind::Deadline, "check what the server waits for with `longshore status`")
        }
        // Another program, or another version of the server, listens at the address.
        Code::Unimplemented => {
            (FaultKind::Internal, "check the address, and that server and worker are of one version")
        }
        _ => (FaultKind::Unavailable, "check that the server runs and is reachable"),
    };
    Fault::new(kind, format!("call to {peer}"), status.message(), "answered", remedy)
}

pub fn fault_to_wire(fault: &Fault) -> v1::Fault {
    let Fault { kind, field, value, limit, remedy } = fault.cut();
    v1::Fault { kind: kind.name().into(), field, value, limit, remedy }
}

pub fn fault_from_wire(fault: v1::Fault) -> Fault {
    let kind = FaultKind::from_name(&fault.kind).unwrap_or(FaultKind::Internal);
    Fault { kind, field: fault.field, value: fault.value, limit: fault.limit, remedy: fault.remedy }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_survives_the_wire() {
        for kind in FaultKind::ALL {
            let fault = Fault::new(kind, "spec.rule", "sgd", "adamw, as opened", "choose another name");
            assert_eq!(fault_from_status(&status(&fault), "here"), fault);
            assert_eq!(fault_from_wire(fault_to_wire(&fault)), fault);
        }
    }

    #[test]
    fn a_status_without_our_details_is_the_transports_and_passes() {
        for code in (1..=16).map(Code::from_i32) {
            let lasting = match code {
                Code::DeadlineExceeded => FaultKind::Deadline,
                Code::Unimplemented => FaultKind::Internal,
                _ => FaultKind::Unavailable,
            };
            let fault = fault_from_status(&Status::new(code, "transport error"), "host:1");
            assert_eq!(fault.kind, lasting, "{code:?}");
            assert!(fault.to_string().contains("host:1"), "{fault}");
        }
    }
}
