//! Files of a corpus, its split, and its batches.

use std::fs;

use super::*;

fn corpus(length: usize) -> Corpus {
    Corpus::split((0..length).map(|index| (index * index % 251) as u8).collect(), 1)
}

#[test]
fn a_folder_is_read_in_order_without_what_is_not_text() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    write("b.md", b"second");
    write("a/z.rs", b"first");
    write("Cargo.lock", b"lock");
    write("target/out.rs", b"built");
    write(".hidden", b"hidden");
    write("target/CACHEDIR.TAG", b"Signature: 8a477f597d28d172789f06886806bc55");
    write("image.png", b"\x89PNG\0");
    write("latin.txt", b"caf\xe9");
    write("empty.txt", b"");
    write("large.json", &vec![b' '; FILE_BYTES_MAX as usize + 1]);
    let corpus = Corpus::load(folder.path()).unwrap();
    assert_eq!(corpus.bytes, b"first\0second\0");
    assert_eq!(corpus.summary().files, 2);
    let file = Corpus::load(&folder.path().join("b.md")).unwrap();
    assert_eq!(file.bytes, b"second\0");
}

#[test]
fn a_folder_without_text_says_what_it_holds() {
    let folder = tempfile::tempdir().unwrap();
    let load = || Corpus::load(folder.path()).unwrap_err();
    assert!(matches!(load(), Error::NoText { files_seen: 0, .. }), "{}", load());
    fs::write(folder.path().join("weights.bin"), [0, 1, 2]).unwrap();
    fs::write(folder.path().join("yarn.lock"), "lock").unwrap();
    assert!(matches!(load(), Error::NoText { files_seen: 2, binary: 1, lock_files: 1, .. }), "{}", load());
    let missing = Corpus::load(&folder.path().join("missing")).unwrap_err();
    assert!(matches!(missing, Error::NotFound { .. }), "{missing}");
}

#[test]
fn a_context_longer_than_the_text_is_refused_with_what_would_fit() {
    for length in [1, 9, 10, 11, 500, 40_000, 40_961, 100_000] {
        let corpus = corpus(length);
        let Err(Error::SequenceTooLong { available, .. }) = corpus.check_context(usize::MAX) else {
            panic!("a text of {length} bytes has no end");
        };
        assert!(corpus.check_context(available + 1).is_err());
        if available > 0 {
            corpus.check_context(available).unwrap();
            assert_eq!(corpus.batch(0, 0, 0, 0, 2, available).inputs.len(), 2 * available);
            assert_eq!(corpus.validation(1, 2, available).len(), 1);
        }
    }
    assert_eq!(corpus(1 << 20).check_context(usize::MAX).unwrap_err().to_string().split(';').count(), 2);
}

#[test]
fn no_byte_is_in_both_parts_of_the_split() {
    for length in [10, 999, 40_960, 70_001] {
        let corpus = corpus(length);
        let mut owner = vec![None; length];
        for (part, pieces) in [(0, &corpus.train), (1, &corpus.validation)] {
            pieces.iter().cloned().flatten().for_each(|byte| assert_eq!(owner[byte].replace(part), None));
            let windows = Windows::new(pieces, length / 20);
            for start in (0..windows.count).map(|window| windows.start(window)) {
                assert!(owner[start..=start + length / 20].iter().all(|owner| *owner == Some(part)));
            }
        }
        assert!(owner.iter().all(Option::is_some));
        let Summary { bytes, train_bytes, validation_bytes, .. } = corpus.summary();
        assert_eq!(train_bytes + validation_bytes, bytes);
        assert!(validation_bytes * 20 >= bytes && validation_bytes * 9 <= bytes);
    }
}

#[test]
fn a_batch_depends_on_its_coordinates_alone() {
    let corpus = corpus(100_000);
    let batch = |seed, step, micro, rank| corpus.batch(seed, step, micro, rank, 4, 64);
    let first = batch(1, 2, 3, 4);
    for other in
        [batch(2, 2, 3, 4), batch(1, 3, 3, 4), batch(1, 2, 4, 4), batch(1, 2, 3, 5), batch(2, 1, 3, 4)]
    {
        assert_ne!(first, other);
    }
    assert_eq!(first, batch(1, 2, 3, 4));
    assert_eq!(first, corpus.clone().batch(1, 2, 3, 4, 4, 64));
    for sequence in 0..4 {
        let (from, to) = (sequence * 64, sequence * 64 + 63);
        assert_eq!(first.inputs[from + 1..=to], first.targets[from..to]);
    }
}

#[test]
fn validation_is_fixed_and_spread_over_all_its_text() {
    let corpus = corpus(1 << 20);
    let batches = corpus.validation(4, 8, 100);
    assert_eq!(batches, corpus.validation(4, 8, 100));
    let windows = Windows::new(&corpus.validation, 100);
    let last = windows.start(31 * windows.count / 32);
    assert_eq!(batches[0].inputs[0], corpus.bytes[corpus.validation[0].start] as u32);
    assert_eq!(batches[3].inputs[700], corpus.bytes[last] as u32);
}
