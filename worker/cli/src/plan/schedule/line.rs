//! A resource that does one thing at a time.

/// The first request goes first. A later request that is ready earlier fills gaps.
#[derive(Clone, Default)]
pub(super) struct Line {
    /// Times of use, in order, without overlap.
    used: Vec<(f64, f64)>,
    pub(super) busy_s: f64,
}

impl Line {
    /// Uses the resource for `seconds`, from `ready_at` on. Returns the end.
    pub(super) fn take(&mut self, ready_at: f64, seconds: f64) -> f64 {
        if seconds <= 0.0 {
            return ready_at;
        }
        self.busy_s += seconds;
        let (mut at, mut left) = (ready_at, seconds);
        let first = self.used.partition_point(|&(_, end)| end < at);
        let mut after = first;
        while let Some(&(start, end)) = self.used.get(after) {
            let gap = (start - at).max(0.0);
            if gap >= left {
                break;
            }
            left -= gap;
            at = at.max(end);
            after += 1;
        }
        let done_at = at + left;
        // The gaps between these uses are full now, so all of them become one.
        let began_at = self.used[first..after].first().map_or(ready_at, |&(start, _)| start.min(ready_at));
        self.used.splice(first..after, [(began_at, done_at)]);
        done_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_ready_earlier_fills_the_gaps() {
        let mut line = Line::default();
        assert_eq!(line.take(10.0, 5.0), 15.0);
        assert_eq!(line.take(0.0, 4.0), 4.0);
        assert_eq!(line.used, [(0.0, 4.0), (10.0, 15.0)]);
        // Six before the first use's end, two behind it.
        assert_eq!(line.take(2.0, 8.0), 17.0);
        assert_eq!(line.used, [(0.0, 17.0)]);
        assert_eq!((line.take(20.0, 1.0), line.take(18.0, 2.0)), (21.0, 20.0));
        assert_eq!(line.busy_s, 20.0);
    }
}
