//! Padding must be 0: any other value there would count in the norm and be trained.

use longshore_proto::{Dtype, Fault, Layout};

use crate::memory::Source;

/// Checks that padding is 0 in `bytes`, which are elements of the flat space in wire format. `first` is the
/// index of the first element.
///
/// # Errors
/// `Invalid`, naming the first element that is not 0.
pub(super) fn check_padding<'a>(
    layout: &Layout,
    first: u64,
    bytes: impl Into<Source<'a, u8>>,
    dtype: Dtype,
) -> Result<(), Fault> {
    let bytes: Source<'_, u8> = bytes.into();
    let size = dtype.bytes();
    for gap in layout.padding(first..first + bytes.len() as u64 / size) {
        let within = ((gap.start - first) * size) as usize..((gap.end - first) * size) as usize;
        let mut outcome = Ok(());
        bytes.slice(within).pieces(|start, piece| {
            let wrong = piece.chunks(size as usize).position(|element| element.iter().any(|&byte| byte != 0));
            if let Some(wrong) = wrong.filter(|_| outcome.is_ok()) {
                let element = gap.start + start as u64 / size + wrong as u64;
                outcome = Err(refused(element, &piece[wrong * size as usize..][..size as usize]));
            }
        });
        outcome?;
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
