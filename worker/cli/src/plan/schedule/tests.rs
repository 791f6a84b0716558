use super::*;

const HARDWARE: Hardware = Hardware {
    gpu_flops: 100e12,
    link: 10e9,
    server_link: 10e9,
    server_memory: 100e9,
    drives: 10e9,
    fabric: 100e9,
    round_trip_s: 0.0,
};

/// Units of 100 MB on the wire, which a link moves in 10 ms.
fn run(units: usize, forward_s: f64) -> Run {
    let unit = Unit { elements: 50e6, trained: 1.0, forward_s, backward_s: 2.0 * forward_s };
    Run {
        units: vec![unit; units],
        gpus: 1.0,
        servers: 1.0,
        shard: 1e6,
        stage: Stage::Two,
        // Room for two units.
        room: 100e6,
        activations: 0.0,
        delayed: false,
        sliced: false,
        micro_steps: 1,
        width: 2.0,
        update_bytes: 28.0,
        drives: DriveTraffic::default(),
    }
}

fn near(found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 1e-9, "{found} instead of {expected}");
}

#[test]
fn one_unit_does_everything_in_turn() {
    let run = run(1, 0.1);
    let step = run.step(&HARDWARE);
    // Compute, push, receive (1 ms), update (14 ms), pull.
    near(step.wall_s, 0.3 + 0.010 + 0.001 + 0.014 + 0.010);
    near(step.compute_s, 0.3);
    assert_eq!(step.binding, Binding::Gpu);
}

#[test]
fn an_exact_step_exposes_the_last_push_and_the_first_update_and_pull() {
    let step = run(20, 0.1).step(&HARDWARE);
    near(step.exposed_s(), 0.010 + 0.001 + 0.014 + 0.010);
}

#[test]
fn a_delayed_step_exposes_nothing_where_the_servers_keep_up() {
    let mut run = run(20, 0.1);
    run.delayed = true;
    assert!(run.step(&HARDWARE).exposed_s() < 1e-9);
    // If servers do not keep up, a step lasts as long as they are busy.
    run.update_bytes = 28.0 * 100.0;
    let step = run.step(&HARDWARE);
    assert_eq!(step.binding, Binding::ServerMemory);
    near(step.wall_s, 20.0 * (1.4 + 0.001));
}

#[test]
fn stage_three_hides_pulls_behind_compute_or_is_bound_by_them() {
    let mut run = run(40, 0.015);
    run.units.iter_mut().for_each(|unit| unit.backward_s = unit.forward_s);
    run.stage = Stage::Three;
    run.delayed = true;
    // Compute of a unit takes 1.5 times its transfer, so all but a few pulls hide.
    let hidden = run.step(&HARDWARE);
    let pulled = 78.0 * 0.010;
    assert!(hidden.exposed_s() < 0.05 * pulled, "{}", hidden.exposed_s());
    // Compute takes half of the transfer.
    run.units.iter_mut().for_each(|unit| (unit.forward_s, unit.backward_s) = (0.005, 0.005));
    let bound = run.step(&HARDWARE);
    assert_eq!(bound.binding, Binding::Pull);
    assert!(bound.wall_s < 1.1 * pulled, "{}", bound.wall_s);
}

#[test]
fn slices_divide_what_the_servers_send_by_the_ranks() {
    let mut whole = run(20, 0.001);
    (whole.gpus, whole.servers) = (8.0, 2.0);
    let sliced = Run { sliced: true, ..whole.clone() };
    let (whole, sliced) = (whole.step(&HARDWARE), sliced.step(&HARDWARE));
    assert!(matches!(whole.binding, Binding::Push | Binding::Pull), "{:?}", whole.binding);
    assert!(sliced.wall_s < whole.wall_s / 3.0, "{} against {}", sliced.wall_s, whole.wall_s);
}

#[test]
fn more_servers_never_make_a_step_longer_and_512_gpus_are_simulated() {
    for (gpus, sliced) in [(1.0, false), (8.0, false), (512.0, true)] {
        for (stage, delayed) in
            [(Stage::Two, false), (Stage::Two, true), (Stage::Three, false), (Stage::Three, true)]
        {
            let mut run = Run { gpus, sliced, stage, delayed, ..run(24, 0.004) };
            let mut before = f64::INFINITY;
            for servers in [1.0, 2.0, 4.0, 8.0, 64.0, 512.0] {
                run.servers = servers;
                let wall_s = run.step(&HARDWARE).wall_s;
                assert!(wall_s <= before * (1.0 + 1e-9), "{gpus} {stage:?} {delayed}: {servers} servers");
                before = wall_s;
            }
            let enough = enough_servers(&run, &HARDWARE, 512);
            run.servers = f64::from(enough);
            assert!(run.step(&HARDWARE).wall_s <= before * 1.01 + 1e-12);
            if enough > 1 {
                run.servers = f64::from(enough - 1);
                assert!(run.step(&HARDWARE).wall_s > before * 1.01);
            }
        }
    }
}

#[test]
fn a_shard_is_as_fast_as_the_one_server_that_has_it() {
    // Units of one shard: the last gradient of backward and the first weights of forward use one link of eight.
    let mut run = Run { shard: 50e6, servers: 8.0, ..run(16, 0.1) };
    let hardware = Hardware { link: f64::INFINITY, ..HARDWARE };
    near(run.step(&hardware).exposed_s(), 0.010 + 0.001 + 0.014 + 0.010);
    // Cut into eight shards, a unit uses all links.
    run.shard /= 8.0;
    near(run.step(&hardware).exposed_s(), (0.010 + 0.001 + 0.014 + 0.010) / 8.0);
}

#[test]
fn frozen_parameters_have_no_gradient_and_no_update() {
    let mut whole = run(20, 0.001);
    let adapters = {
        let mut run = whole.clone();
        run.units.iter_mut().for_each(|unit| unit.trained = 0.01);
        run
    };
    whole.units.iter_mut().for_each(|unit| unit.elements *= 0.01);
    // At stage 2 frozen parameters lie on the device, and a step equals that of the trained ones alone.
    near(adapters.step(&HARDWARE).wall_s, whole.step(&HARDWARE).wall_s);
    // At stage 3 frozen parameters are pulled.
    let pulled = Run { stage: Stage::Three, ..adapters }.step(&HARDWARE);
    assert_eq!(pulled.binding, Binding::Pull);
    assert!(pulled.wall_s > 38.0 * 0.010, "{}", pulled.wall_s);
}

#[test]
fn stage_three_reads_the_drives_for_each_pull() {
    let mut spilled = Run { stage: Stage::Three, ..run(20, 0.0001) };
    // Ten times slower than the link, so that drives bind.
    let hardware = Hardware { drives: 1e9, ..HARDWARE };
    spilled.drives = DriveTraffic { pull: 2.0, frozen_pull: 2.0, ..DriveTraffic::default() };
    let step = spilled.step(&hardware);
    assert_eq!(step.binding, Binding::Drives);
    near(step.binding_s, 38.0 * 0.100);
    // A single read serves all ranks.
    let ranks = Run { gpus: 4.0, ..spilled.clone() };
    near(ranks.step(&Hardware { link: 1e15, server_link: 1e15, ..hardware }).binding_s, 38.0 * 0.100);
    // At stage 2 pulls find the images in DRAM.
    assert_ne!(Run { stage: Stage::Two, ..spilled.clone() }.step(&hardware).binding, Binding::Drives);
    // The image window has only trained weights, so a frozen base is read at each pull.
    spilled.units.iter_mut().for_each(|unit| unit.trained = 0.01);
    spilled.drives.pull = 0.0;
    near(spilled.step(&hardware).binding_s, 38.0 * 0.099);
}

#[test]
fn the_bytes_of_a_step_are_those_that_links_carry() {
    let mut run = Run { gpus: 4.0, servers: 2.0, micro_steps: 3, ..run(20, 0.001) };
    let hardware = Hardware { fabric: 1e15, ..HARDWARE };
    for (stage, sliced) in
        [(Stage::Two, false), (Stage::Two, true), (Stage::Three, false), (Stage::Three, true)]
    {
        (run.stage, run.sliced) = (stage, sliced);
        let traffic = run.traffic();
        let busy = Simulation::of(&run, &hardware).busy_step();
        let of = |binding| busy.iter().find(|(found, _)| *found == binding).unwrap().1;
        // Links of servers carry the bytes of two of four ranks.
        near(traffic.server_out / hardware.server_link, of(Binding::Pull));
        near(traffic.server_in / hardware.server_link, of(Binding::Push));
        near(traffic.server_in, 2.0 * traffic.push);
        assert_eq!(traffic.fabric > 0.0, sliced);
        near(traffic.push, 3.0 * 20.0 * 100e6 / if sliced { 4.0 } else { 1.0 });
    }
}

#[test]
fn what_stays_on_the_device_is_not_pulled_again() {
    let hardware = Hardware { server_memory: 1e12, ..HARDWARE };
    let mut run = Run { stage: Stage::Three, delayed: true, ..run(20, 0.001) };
    let two = run.step(&hardware);
    run.room = 11.0 * 50e6;
    let eleven = run.step(&hardware);
    near(two.binding_s, 38.0 * 0.010);
    near(eleven.binding_s, 29.0 * 0.010);
    assert!(eleven.wall_s < two.wall_s, "{} against {}", eleven.wall_s, two.wall_s);
    run.room = 20.0 * 50e6;
    near(run.step(&hardware).binding_s, 20.0 * 0.010);
    // The next micro-step reads the same version, and finds the units that backward used last.
    (run.room, run.micro_steps) = (11.0 * 50e6, 2);
    near(run.step(&hardware).binding_s, (20.0 + 3.0 * 9.0) * 0.010);
}

#[test]
fn what_stays_is_what_there_is_room_for_from_the_end() {
    let mut run = Run { stage: Stage::Three, ..run(4, 0.1) };
    // The first unit is an embedding, four times as large.
    run.units[0].elements = 200e6;
    for (room, staying) in [(50e6, 1), (149e6, 2), (150e6, 3), (349e6, 3), (350e6, 4)] {
        run.room = room;
        assert_eq!(run.staying(), staying, "{room}");
    }
    run.room = 250e6;
    // The embedding needs all but one unit to go, and the last unit needs the embedding to go.
    assert_eq!(run.makes_room(&[3, 2, 1], 0), Some(1));
    assert_eq!(run.makes_room(&[0, 1, 2], 3), Some(0));
    assert_eq!(run.makes_room(&[1, 2], 3), None);
}

#[test]
fn activations_hide_behind_compute_or_bind() {
    // A unit computes for 15 ms in forward, and again in backward.
    let mut run = Run { delayed: true, ..run(40, 0.015) };
    run.units.iter_mut().for_each(|unit| unit.backward_s = unit.forward_s);
    let hardware = Hardware { server_link: 1e15, ..HARDWARE };
    let without = run.step(&hardware).wall_s;
    // A unit's activations take 4 ms on the link, beside 10 ms for its gradient or its weights.
    run.activations = 40.0 * 40e6;
    assert!(run.step(&hardware).wall_s < 1.02 * without, "{} against {without}", run.step(&hardware).wall_s);
    assert_eq!(run.traffic().activations, 40.0 * 40e6);
    // Activations take 30 ms: neither their way out in forward nor their way back hides.
    run.activations = 40.0 * 300e6;
    let bound = run.step(&hardware);
    assert!(bound.wall_s >= 2.0 * 38.0 * 0.030, "{}", bound.wall_s);
    assert!(matches!(bound.binding, Binding::Push | Binding::Pull), "{:?}", bound.binding);
}
