//! Guarantees to callers: order, panics, every size, several callers, and idle threads that do nothing.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Barrier, Condvar, Mutex},
    thread,
    time::{Duration, Instant},
};

use super::{account::Queue, cpus::Node, *};

#[test]
fn results_come_in_order_for_every_size_and_number_of_threads() {
    for threads in [1, 2, 3, 5, 16] {
        let pool = ThreadPool::new(threads).unwrap();
        assert_eq!(pool.threads(), threads);
        for size in (0..70).chain([1000, 4096]) {
            let found = pool.blocks((0..size).collect(), |item: usize| (item, item * item));
            let expected: Vec<_> = (0..size).map(|item| (item, item * item)).collect();
            assert_eq!(found, expected, "{size} items on {threads} threads");
        }
    }
}

#[test]
fn groups_keep_their_results_apart_and_each_block_its_home() {
    for threads in [1, 2, 3, 5] {
        let pool = ThreadPool::new(threads).unwrap();
        let sizes = [4, 0, 64, 1, 7];
        let groups = |size: usize| (0..size).collect();
        let found = pool.groups(&pool.anybody, sizes.map(groups).to_vec(), |item: usize| item * item, || ());
        let expected = sizes.map(|size| (0..size).map(|item| item * item).collect::<Vec<_>>());
        assert_eq!(found, expected, "{threads} threads");
        assert_eq!(
            pool.groups(&pool.anybody, Vec::new(), |item: usize| item, || ()),
            Vec::<Vec<usize>>::new()
        );
    }
    // Each group has as many blocks as there are threads, and its blocks wait for each other. So each thread must run
    // its own block of each group.
    let pool = ThreadPool::new(2).unwrap();
    let barrier = Barrier::new(2);
    let block = |()| {
        barrier.wait();
        thread::current().id()
    };
    let mut done = false;
    let ran = pool.groups(&pool.anybody, vec![vec![(), ()]; 2], block, || done = true);
    assert!(done);
    assert_eq!(ran[0], ran[1]);
    assert_eq!(ran[0][0], thread::current().id());
}

#[test]
fn a_panic_in_any_block_reaches_the_caller_and_the_pool_lives_on() {
    let pool = ThreadPool::new(4).unwrap();
    for bad in [0, 31, 63] {
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.blocks((0..64).collect(), |item: usize| assert_ne!(item, bad, "block {bad} is broken"))
        }));
        let message = *caught.unwrap_err().downcast::<String>().unwrap();
        assert!(message.contains(&format!("block {bad} is broken")), "{message}");
        assert_eq!(pool.blocks(vec![1, 2, 3], |item| item + 1), [2, 3, 4]);
    }
}

#[test]
fn several_callers_and_calls_from_inside_a_block_do_not_wait_for_each_other() {
    let pool = ThreadPool::new(3).unwrap();
    thread::scope(|scope| {
        for caller in 0..4u64 {
            let pool = &pool;
            scope.spawn(move || {
                for round in 0..200u64 {
                    let sums = pool.blocks((0..9u64).collect(), |item| {
                        pool.blocks(vec![item, caller, round], |part| part).iter().sum::<u64>()
                    });
                    let expected: Vec<u64> = (0..9).map(|item| item + caller + round).collect();
                    assert_eq!(sums, expected);
                }
            });
        }
    });
}

/// The CPU time that all threads of the pool have used.
fn busy(threads: &[String]) -> Duration {
    let nanos = threads.iter().map(|path| {
        let text = fs::read_to_string(path).unwrap();
        text.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    });
    Duration::from_nanos(nanos.sum())
}

#[test]
fn an_idle_pool_uses_no_processor_time() {
    let pool = ThreadPool::new(4).unwrap();
    let barrier = Barrier::new(4);
    let paths = pool.blocks((0..4).collect(), |_: usize| {
        barrier.wait();
        let id = rustix::thread::gettid().as_raw_nonzero();
        format!("/proc/self/task/{id}/schedstat")
    });
    // The first path is the caller's own thread.
    let paths = &paths[1..];
    let (never, wait) = (Mutex::new(()), Condvar::new());
    let (begun, before) = (Instant::now(), busy(paths));
    let idle = wait.wait_timeout_while(lock(&never), Duration::from_millis(300), |()| true);
    assert!(idle.unwrap().1.timed_out());
    let used = busy(paths) - before;
    assert!(used < begun.elapsed() / 100, "{used:?} of {:?} used while idle", begun.elapsed());
}

#[test]
fn a_block_has_the_same_home_at_every_call_and_help_stays_near() {
    let node = |cores: &[usize]| Node { cores: cores.to_vec() };
    let nodes = [node(&[0, 1, 2, 3]), node(&[4, 5, 6, 7])];
    let full = seats(8, &nodes);
    assert_eq!(
        full.iter().map(|seat| seat.cores.clone()).collect::<Vec<_>>(),
        [[0], [1], [2], [3], [4], [5], [6], [7]]
    );
    assert_eq!(full[0].reach, 0..8, "the caller can finish alone");
    assert_eq!((full[3].reach.clone(), full[4].reach.clone()), (0..4, 4..8));
    let half = seats(4, &nodes);
    assert_eq!((&half[1].cores, &half[2].cores), (&nodes[0].cores, &nodes[1].cores));
    // With one node, the caller's seat has no fixed cores. In a pool that leaves cores to others, no seat
    // has.
    assert_eq!(seats(2, &[node(&[0, 1])])[1].cores, [1]);
    assert!(seats(2, &nodes[..1]).iter().all(|seat| seat.cores.is_empty()));
    assert!(seats(3, &[node(&[])]).iter().all(|seat| seat.cores.is_empty()));

    let phase = Phase::new((0..8).map(|seat| share(64, seat, 8)).collect(), &full);
    let own: Vec<usize> = (0..8).map(|_| phase.take(5).unwrap()).collect();
    assert_eq!(own, (40..48).collect::<Vec<_>>());
    assert_eq!(phase.take(5), Some(55), "then the last block of the next seat");
    let near: Vec<usize> = std::iter::from_fn(|| phase.take(5)).collect();
    assert!(near.iter().all(|block| (32..64).contains(block)), "{near:?}");
    assert!(!phase.has_blocks_for(5) && phase.has_blocks_for(0));
    assert_eq!(std::iter::from_fn(|| phase.take(0)).count(), 32);
}

#[test]
fn shares_cover_everything_once_on_one_node_and_on_several() {
    let cores = cpus::nodes().remove(0).cores;
    let several = [Node { cores: cores.clone() }, Node { cores }];
    for nodes in [&several[..1], &several] {
        let pool = ThreadPool::on(3, nodes).unwrap();
        let seen = Mutex::new(vec![0; 100]);
        pool.shares(100, &|range| lock(&seen)[range].iter_mut().for_each(|count| *count += 1));
        assert_eq!(*lock(&seen), [1; 100]);
        assert_eq!(pool.blocks((0..50).collect(), |item: usize| item), (0..50).collect::<Vec<_>>());
    }
}

/// Returns the order in which a free thread would take the calls' accounts, if each call used up its time at
/// once.
fn order(calls: &[&Arc<Account>], units: u64, count: usize) -> Vec<usize> {
    let queue = Queue::default();
    calls.iter().for_each(|account| queue.enter(account));
    let next = |_| {
        let used = |at: &usize| calls[*at].used();
        let at = (0..calls.len()).min_by_key(used).expect("a call");
        queue.serve(calls[at]);
        calls[at].use_up(units);
        at
    };
    (0..count).map(next).collect()
}

#[test]
fn jobs_take_turns() {
    assert_eq!(order(&[&Account::new(), &Account::new()], 1000, 6), [0, 1, 0, 1, 0, 1]);
}

#[test]
fn who_comes_later_is_owed_nothing_for_the_time_before() {
    let (early, late) = (Account::new(), Account::new());
    let queue = Queue::default();
    queue.enter(&early);
    for _ in 0..100 {
        queue.serve(&early);
        early.use_up(1000);
    }
    queue.enter(&late);
    // The late account begins where the other one was when it was served last: one turn ahead, and not a
    // hundred.
    assert_eq!(early.used() - late.used(), 1000);
    queue.leave(&early);
    queue.leave(&late);
    // No account is owed anything once all were served.
    let third = Account::new();
    queue.enter(&third);
    assert_eq!(third.used(), early.used());
}

/// A pool's thread turns to another call between two blocks of an unfinished one. The first call's caller waits inside
/// a block until that thread has run a block of the second call.
#[test]
fn a_thread_turns_to_another_call_before_the_first_is_done() {
    let pool = ThreadPool::new(2).unwrap();
    let [first, second] = [Account::new(), Account::new()];
    let (begun, turned) = (AtomicBool::new(false), AtomicBool::new(false));
    let deadline = Instant::now() + Duration::from_secs(60);
    let until = |flag: &AtomicBool| {
        while !flag.load(Ordering::Acquire) && Instant::now() < deadline {
            thread::yield_now();
        }
        flag.load(Ordering::Acquire)
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            let caller = thread::current().id();
            // The caller waits inside its first block; the other thread goes through the rest, a block a turn.
            pool.groups(
                &first,
                vec![(0..100_000).collect()],
                |_: usize| {
                    begun.store(true, Ordering::Release);
                    if thread::current().id() == caller {
                        assert!(until(&turned), "the pool's thread went on with the first call");
                    } else if !turned.load(Ordering::Acquire) {
                        thread::sleep(Duration::from_micros(100));
                    }
                },
                || (),
            );
        });
        assert!(until(&begun));
        let caller = thread::current().id();
        pool.groups(
            &second,
            vec![(0..64).collect()],
            |_: usize| {
                if thread::current().id() == caller {
                    until(&turned);
                } else {
                    turned.store(true, Ordering::Release);
                }
            },
            || (),
        );
    });
}

#[test]
fn update_threads_leave_the_floating_point_mode_of_the_thread_that_starts_them() {
    let foreign = crate::memory::float::foreign_for_tests();
    let pool = ThreadPool::new(2).unwrap();
    drop(foreign);
    // Two blocks that wait for each other run on both threads.
    let barrier = Barrier::new(2);
    let halved = |least: f32| {
        barrier.wait();
        std::hint::black_box(least) / 2.0
    };
    assert_eq!(pool.blocks(vec![f32::MIN_POSITIVE; 2], halved), [f32::from_bits(1 << 22); 2]);
}
