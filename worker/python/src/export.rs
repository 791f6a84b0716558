//! Writes a version of the job's weights or state into tensors, as it arrives from the servers.

use longshore_proto::{Fault, StateArray};
use longshore_worker::{Result, Session, export::Contents};

use crate::memory::HostTensor;

/// Exports the newest version into `targets`. Each array has one tensor per parameter in the job's order; an
/// unwanted array has none. Frozen parameters, which come last, may be left out. Returns the version, and the
/// number of updates that made it.
pub(crate) fn export(
    session: &Session,
    contents: Contents,
    targets: &[Vec<HostTensor>],
) -> Result<(u64, u64)> {
    let layout = session.layout();
    check(session, contents, targets)?;
    let dtype = contents.dtype();
    let write = |array: StateArray, at: u64, bytes: &[u8]| {
        let targets = &targets[array.index()];
        if targets.is_empty() {
            return Ok(());
        }
        let end = at + bytes.len() as u64 / dtype.bytes();
        for param in layout.params_in(at..end) {
            let Some(target) = targets.get(param) else { break };
            let place = layout.param_range(param);
            let (from, to) = (place.start.max(at), place.end.min(end));
            let values = &bytes[((from - at) * dtype.bytes()) as usize..((to - at) * dtype.bytes()) as usize];
            target.write_from((from - place.start) as usize, dtype, values);
        }
        Ok(())
    };
    let exported = session.export(contents, &write)?;
    Ok((exported.version.0, exported.applied))
}

fn check(session: &Session, contents: Contents, targets: &[Vec<HostTensor>]) -> Result<()> {
    let (layout, params) = (session.layout(), session.spec().params.len());
    let trained = (0..params).rposition(|param| !layout.is_param_frozen(param)).map_or(0, |last| last + 1);
    let arrays = contents.arrays().len();
    let remedy = "name the parameters in the job's order, for each of its arrays";
    if targets.len() != arrays || targets.iter().any(|tensors| ![0, trained, params].contains(&tensors.len()))
    {
        let limit = format!("{params} for each of {arrays} arrays");
        return Err(Fault::invalid("targets", targets.len(), limit, remedy).into());
    }
    for (param, tensor) in targets.iter().flat_map(|tensors| tensors.iter().enumerate()) {
        let place = layout.param_range(param);
        if tensor.param != param || tensor.elements() != place.end - place.start {
            let limit = format!("{} elements of parameter {param}", place.end - place.start);
            return Err(Fault::invalid("targets", tensor.elements(), limit, remedy).into());
        }
    }
    Ok(())
}
