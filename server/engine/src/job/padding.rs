//! Padding is 0: what is anything else there would count in the norm, and be trained.

use longshore_proto::{Dtype, Fault, Layout};

/// Checks the padding among elements of the flat space, as they go over the wire; `first` is the first one's place.
///
/// # Errors
/// `Invalid`, naming the first element that is not 0.
pub(super) fn check_padding(layout: &Layout, first: u64, bytes: &[u8], dtype: Dtype) -> Result<(), Fault> {
    let size = dtype.bytes();
    for gap in layout.padding(first..first + bytes.len() as u64 / size) {
        let within = ((gap.start - first) * size) as usize..((gap.end - first) * size) as usize;
        if let Some(at) = bytes[within.clone()].iter().position(|&byte| byte != 0) {
            let element = gap.start + at as u64 / size;
            let start = ((element - first) * size) as usize;
            return Err(refused(element, &bytes[start..start + size as usize]));
        }
    }
    Ok(())
}

fn refused(element: u64, bytes: &[u8]) -> Fault {
    let little_endian: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let value = format!("{} at element {element} of the flat space", little_endian.join(" "));
    let limit = "0 there, since no parameter lies there";
    let remedy = "parameters start at multiples of 64 elements, and the last block is filled up: send zeros between them";
    Fault::invalid("payload", value, limit, remedy)
}
