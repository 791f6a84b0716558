//! A set of small indices. Contributions are tracked by bits, never by a counter: a repeated chunk must not count twice.

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Bitmap {
    words: Vec<u64>,
    len: u32,
}

impl Bitmap {
    pub(super) fn new(len: u32) -> Bitmap {
        Bitmap { words: vec![0; len.div_ceil(64) as usize], len }
    }

    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn get(&self, index: u32) -> bool {
        self.words[index as usize / 64] & (1 << (index % 64)) != 0
    }

    pub(super) fn set(&mut self, index: u32, value: bool) {
        let mask = 1u64 << (index % 64);
        let word = &mut self.words[index as usize / 64];
        *word = if value { *word | mask } else { *word & !mask };
    }

    pub(super) fn clear(&mut self) {
        self.words.fill(0);
    }

    pub(super) fn count(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    pub(super) fn is_full(&self) -> bool {
        self.count() == self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::Bitmap;

    #[test]
    fn a_repeated_bit_counts_once() {
        let mut bitmap = Bitmap::new(65);
        for _ in 0..2 {
            (0..65).for_each(|index| bitmap.set(index, true));
        }
        assert!(bitmap.is_full());
        bitmap.set(64, false);
        assert_eq!((bitmap.count(), bitmap.get(64), bitmap.is_full()), (64, false, false));
    }
}
