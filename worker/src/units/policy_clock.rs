//! The policy against the clock: a link and compute of given speed, in virtual time. The link brings one unit at a time,
//! in the order in which they were asked for, and takes gradients the other way. A unit of one byte takes it one second. A
//! version can be had once all gradients that it is made of are there; deciding and updating take no time.

use super::*;

/// What hides at least, where compute is slower than the link.
const HIDDEN: f64 = 0.95;
/// How many times the bound a step may take, where compute is faster.
const OF_BOUND: f64 = 1.1;

const WARM_STEPS: u64 = 3;
const STEPS: u64 = 8;

struct Model {
    name: &'static str,
    sizes: Vec<u64>,
    order: Vec<usize>,
}

impl Model {
    fn there_and_back(name: &'static str, sizes: Vec<u64>) -> Model {
        let order = there_and_back(sizes.len());
        Model { name, sizes, order }
    }

    /// The embedding is the head as well: forward and backward begin and end with it.
    fn tied(embedding: u64, blocks: usize) -> Model {
        let sizes = std::iter::once(embedding).chain(std::iter::repeat_n(4, blocks)).collect();
        let forward = (0..=blocks).chain([0]);
        let order = forward.clone().chain(forward.rev()).collect();
        Model { name: "tied", sizes, order }
    }

    /// From two of the largest units to all weights of both versions.
    fn budgets(&self) -> Vec<u64> {
        let (all, largest) = (self.sizes.iter().sum::<u64>(), self.sizes.iter().max().unwrap());
        let mut budgets = vec![2 * largest, 3 * largest, all / 3, all / 2, 3 * all / 4, all, 2 * all];
        budgets.retain(|budget| *budget >= 2 * largest);
        budgets.sort_unstable();
        budgets.dedup();
        budgets
    }
}

/// One use of a unit, as the policy let it be.
struct Use {
    item: Item,
    size: u64,
    /// Whether it is the last one of the step, after which the gradient leaves.
    ends: bool,
    /// Whether it came for this use, and did not stay since another one.
    came: bool,
}

/// When the last use of each step ends if the link brings what came, in the order of uses, and rests only where it must:
/// until a version can be had, and until there is room beside what is in use and what stays. So an exact step takes no less
/// than its pulls in forward, the compute of its last unit, that unit's gradient, and all other gradients after it.
fn bound(uses: &[Use], (budget, delay, compute): (u64, u64, f64)) -> Vec<f64> {
    let stays = stays(uses);
    let mut steps: Vec<f64> = Vec::new();
    let (mut link, mut ends, mut brought) = (0.0f64, Vec::<f64>::new(), Vec::<u64>::new());
    let (mut uplink, mut made) = (0.0f64, Vec::<f64>::new());
    for (at, used) in uses.iter().enumerate() {
        let step = used.item.label.0;
        let sum = brought.last().copied().unwrap_or(0) + if used.came { used.size } else { 0 };
        let mut begin = ends.last().copied().unwrap_or(0.0);
        if used.came {
            let full = |before: &usize| sum - brought[*before] + stays[*before] > budget;
            let room = (0..at).rev().find(full).map_or(0.0, |before| ends[before]);
            let version = step.checked_sub(1 + delay).map_or(0.0, |made_by| made[made_by as usize]);
            link = link.max(room).max(version) + used.size as f64;
            begin = begin.max(link);
        }
        let end = begin + compute * used.size as f64;
        brought.push(sum);
        ends.push(end);
        if used.ends {
            uplink = uplink.max(end) + used.size as f64;
        }
        for (times, time) in [(&mut steps, end), (&mut made, uplink)] {
            times.resize(step as usize + 1, time);
            times[step as usize] = time;
        }
    }
    steps
}

/// The bytes that are there during each use whatever is loaded ahead: the unit in use, and those that stay for later uses.
fn stays(uses: &[Use]) -> Vec<u64> {
    let mut staying: BTreeMap<Item, u64> = BTreeMap::new();
    let mut stays = Vec::new();
    for used in uses.iter().rev() {
        staying.remove(&used.item);
        let again = staying.values().sum::<u64>();
        stays.push(again + used.size);
        if !used.came {
            staying.insert(used.item, used.size);
        }
    }
    stays.reverse();
    stays
}

/// A device whose units come over a link, and compute that takes its time.
struct Clock {
    device: Device,
    /// The seconds of compute for each byte of a unit.
    compute: f64,
    now: f64,
    /// What the link brings, and when it will be there.
    bringing: Option<(Item, f64)>,
    /// When the gradients that were sent are there.
    uplink: f64,
    /// By step: when its last gradient was there.
    made: Vec<f64>,
    delay: u64,
    waited: f64,
    /// What came.
    bytes: u64,
    /// What came and nobody has used yet.
    unused: BTreeSet<Item>,
    uses: Vec<Use>,
}

impl Clock {
    /// Has the link bring what was asked for first and can be had, by then.
    fn pull(&mut self, until: f64) {
        let Device { coming, last_loads, sizes, .. } = &mut self.device;
        if self.bringing.is_some_and(|(item, _)| !coming.contains(&item)) {
            self.bringing = None;
        }
        if self.bringing.is_none() {
            last_loads.retain(|item| coming.contains(item));
            let from = |item: &Item| match item.label.0.checked_sub(1 + self.delay) {
                Some(made_by) => self.made.get(made_by as usize).map(|made| made.max(self.now)),
                None => Some(self.now),
            };
            let known = last_loads.iter().filter_map(|item| Some((*item, from(item)?)));
            let next = known.min_by(|(_, one), (_, other)| one.total_cmp(other));
            let next = next.filter(|(_, from)| *from <= until);
            self.bringing = next.map(|(item, from)| (item, from + sizes[item.unit] as f64));
        }
    }

    /// Lets the next unit come, if it comes by then.
    fn bring(&mut self, until: f64) -> bool {
        self.pull(until);
        let Some((item, at)) = self.bringing.filter(|(_, at)| *at <= until) else { return false };
        (self.now, self.bringing) = (at, None);
        let bytes = self.device.sizes[item.unit];
        self.bytes += bytes;
        self.unused.insert(item);
        assert!(self.device.policy.arriving(item));
        self.device.coming.remove(&item);
        self.device.here.insert(item);
        let actions = self.device.policy.arrived(item);
        self.device.act(actions);
        true
    }

    fn use_unit(&mut self, unit: usize, label: Label, ends: bool) {
        let asked = self.now;
        self.device.policy.uses(unit);
        loop {
            let (demand, actions) = self.device.policy.demand(unit);
            self.device.act(actions);
            if demand == Demand::Here {
                break;
            }
            assert!(self.bring(f64::MAX), "unit {unit} is awaited and nothing comes");
        }
        self.waited += self.now - asked;
        let (item, size) = (Item { unit, label }, self.device.sizes[unit]);
        self.uses.push(Use { item, size, ends, came: self.unused.remove(&item) });
        let until = self.now + self.compute * size as f64;
        while self.bring(until) {}
        self.now = until;
        if ends {
            self.uplink = self.uplink.max(self.now) + size as f64;
        }
        self.device.release(unit);
        self.pull(self.now);
    }

    /// A step, before which the version that it reads is there; in a delayed job the next one can be asked for, too.
    fn step(&mut self, step: u64, order: &[usize]) {
        let before = step.checked_sub(1 + self.delay).map_or(0.0, |made_by| self.made[made_by as usize]);
        self.now = self.now.max(before);
        self.device.newest = step + self.delay;
        let upcoming = || (self.delay > 0).then_some(Label(step + 1)).into_iter().collect();
        let actions = self.device.policy.begin(Label(step), upcoming());
        self.device.act(actions);
        for (at, &unit) in order.iter().enumerate() {
            self.use_unit(unit, Label(step), !order[at + 1..].contains(&unit));
        }
        self.made.push(self.uplink);
        let actions = self.device.policy.end(vec![Label(step + 1)]);
        self.device.act(actions);
    }
}

/// The means of a step, once the order is known.
#[derive(Debug)]
struct Times {
    step: f64,
    waited: f64,
    /// What the link was busy for.
    transfer: f64,
    bound: f64,
}

fn timed(model: &Model, budget: u64, delay: u64, compute: f64) -> Times {
    let window = 2 * model.sizes.iter().max().unwrap();
    let device = Device::new(model.sizes.clone(), budget, window);
    let (unused, uses, made) = Default::default();
    let (now, bringing, uplink, waited, bytes) = (0.0, None, 0.0, 0.0, 0);
    let mut clock =
        Clock { device, compute, now, bringing, uplink, made, delay, waited, bytes, unused, uses };
    (0..WARM_STEPS).for_each(|step| clock.step(step, &model.order));
    let (now, waited, bytes) = (clock.now, clock.waited, clock.bytes);
    (WARM_STEPS..WARM_STEPS + STEPS).for_each(|step| clock.step(step, &model.order));
    let steps = bound(&clock.uses, (budget, delay, compute));
    let mean = |sum: f64| sum / STEPS as f64;
    Times {
        step: mean(clock.now - now),
        waited: mean(clock.waited - waited),
        transfer: mean((clock.bytes - bytes) as f64),
        bound: mean(steps[(WARM_STEPS + STEPS - 1) as usize] - steps[WARM_STEPS as usize - 1]),
    }
}

fn models() -> [Model; 4] {
    let unequal = (0..24).map(|unit| 2 + 5 * (unit % 3)).collect();
    [
        Model::there_and_back("uniform", vec![4; 24]),
        Model::there_and_back("deep", vec![4; 64]),
        Model::there_and_back("unequal", unequal),
        Model::tied(24, 24),
    ]
}

fn each_case(mut check: impl FnMut(&Model, u64, u64)) {
    for model in models() {
        for budget in model.budgets() {
            (0..=1).for_each(|delay| check(&model, budget, delay));
        }
    }
}

/// In an exact step the first unit cannot be asked for before the step begins, so that it is waited for.
#[test]
fn transfers_hide_behind_slower_compute() {
    let mut failed = Vec::new();
    each_case(|model, budget, delay| {
        let times = timed(model, budget, delay, 1.5);
        let first = if delay == 0 { model.sizes[model.order[0]] as f64 } else { 0.0 };
        let hidden = 1.0 - (times.waited - first) / times.transfer;
        println!("{} in {budget}, delay {delay}: {hidden:.3} hidden, {times:?}", model.name);
        if hidden < HIDDEN {
            failed.push((model.name, budget, delay, hidden));
        }
    });
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn faster_compute_keeps_the_link_busy() {
    let mut failed = Vec::new();
    each_case(|model, budget, delay| {
        let times = timed(model, budget, delay, 0.5);
        let ratio = times.step / times.bound;
        println!("{} in {budget}, delay {delay}: {ratio:.3} of the bound, {times:?}", model.name);
        if ratio > OF_BOUND {
            failed.push((model.name, budget, delay, ratio));
        }
    });
    assert!(failed.is_empty(), "{failed:?}");
}
