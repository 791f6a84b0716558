//! Reads a state directory that no server uses, and verifies every byte in use.

use std::{path::Path, sync::Mutex};

use longshore_proto::{Fault, FaultKind, ServerId, ShardId};

use super::{
    super::{
        fault::{corrupt, io},
        folder::{Folder, Header},
        inspect::{Report, VersionReport},
    },
    durable::StoredRecord,
    plan::{FilePlan, StorePlan},
    recover::{Blocks, Records, read_table},
};
use crate::{
    ids::OwnedShard,
    io::{Disk, OpenDisk, OpenFile},
    memory::{Region, Slab},
};

pub(in crate::tier) fn inspect(folder: &Folder, header: Header) -> Result<Report, Fault> {
    let layout = header.spec.validate()?;
    header.placement.validate(layout.shards())?;
    let held = header.placement.held(header.server);
    let (files, spilled) = (header.directories, header.spilled_images);
    let plan = StorePlan::new(&header.spec, &layout, &held, files, spilled, header.format);
    let data = folder.path.join("data");
    let disk = OpenFile::default().open(&data).map_err(io("open", &data))?;
    inspect_disk(&folder.path, &header, &plan, &*disk)
}

fn inspect_disk(path: &Path, header: &Header, plan: &StorePlan, disk: &dyn Disk) -> Result<Report, Fault> {
    let slab =
        Slab::allocate(plan.meta_bytes()).map_err(|error| corrupt(error, "enough memory", "free some"))?;
    let meta = Mutex::new(slab.carve_here(&[plan.meta_bytes()]).pop());
    let records = Records::read(plan, &[disk], &[&meta], header.store)?;
    let mut versions = Vec::new();
    for stored in records.valid.values() {
        versions.push(check_version(plan, header.server, header.directory, disk, &meta, stored)?);
    }
    Ok(Report {
        folder: path.to_path_buf(),
        header: header.clone(),
        records: records.copies,
        broken_records: records.broken,
        versions,
        damage: Vec::new(),
    })
}

pub(super) fn check_version(
    plan: &StorePlan,
    server: ServerId,
    file: usize,
    disk: &dyn Disk,
    meta: &Mutex<Option<Region>>,
    stored: &StoredRecord,
) -> Result<VersionReport, Fault> {
    let mut report = VersionReport {
        version: stored.record.version,
        applied: stored.record.applied,
        state_slot: stored.slots.state,
        blocks: 0,
        damaged: Vec::new(),
    };
    let (slots, roots) = (stored.slots, stored.roots[file]);
    let files: &FilePlan = &plan.files[file];
    let mut check = Check { blocks: Blocks { plan, disk, meta }, files, report: &mut report };
    // The tables cover a shard of the version, unless it lies apart.
    let is_covered = |owned: OwnedShard| {
        let place = &plan.shards[owned.index()];
        let is_apart = stored.apart.iter().any(|apart| Some(apart.owned) == place.position);
        !is_apart && stored.record.versions_of(place.shard, server, place.opened).is_some()
    };
    check.table(
        (files.state_table_at(slots.state), roots.state),
        &format!("slot {}", slots.state),
        |check, owned, block| match is_covered(owned) {
            true => check.blocks.state(owned, slots.state, block).map(Some),
            false => Ok(None),
        },
    )?;
    for apart in &stored.apart {
        let Some(&owned) = plan.order.get(apart.owned).filter(|owned| files.owned.contains(owned)) else {
            continue;
        };
        check.report.blocks += (plan.shards[owned.index()].blocks() * (1 + apart.images.len())) as u64;
        match check.blocks.apart(owned, apart) {
            Ok(_) => {}
            Err(fault) if fault.kind == FaultKind::Corrupt => {
                check.report.damaged.push(format!("{}, not {}", fault.value, fault.limit));
            }
            Err(fault) => return Err(fault),
        }
    }
    if plan.images {
        for (slot, root) in [(Some(slots.image), roots.image), (slots.older_image, roots.older_image)] {
            let Some(slot) = slot else { continue };
            check.table(
                (files.image_table_at(slot), root),
                &format!("image slot {slot}"),
                |check, owned, block| match is_covered(owned) {
                    true => check.blocks.image(owned, slot, block),
                    false => Ok(None),
                },
            )?;
        }
    }
    Ok(report)
}

struct Check<'a> {
    blocks: Blocks<'a>,
    files: &'a FilePlan,
    report: &'a mut VersionReport,
}

impl Check<'_> {
    fn table(
        &mut self,
        at: (u64, u64),
        what: &str,
        read: impl Fn(&Check<'_>, OwnedShard, usize) -> Result<Option<u64>, Fault>,
    ) -> Result<(), Fault> {
        let Blocks { plan, disk, meta } = self.blocks;
        let table = match read_table(disk, meta, self.files, at, what) {
            Ok(table) => table,
            Err(fault) => {
                self.report.damaged.push(format!("{}, not {}", fault.value, fault.limit));
                return Ok(());
            }
        };
        let mut checksums = table.into_iter();
        for &owned in &self.files.owned {
            for (block, expected) in checksums.by_ref().take(plan.shards[owned.index()].blocks()).enumerate()
            {
                let found = read(self, owned, block)?;
                if found.is_none() {
                    continue; // an image of a frozen shard, or a shard that lies apart or elsewhere
                }
                self.compare((owned, block), what, (found.unwrap_or_default(), expected));
            }
        }
        Ok(())
    }

    fn compare(&mut self, (owned, block): (OwnedShard, usize), what: &str, (found, expected): (u64, u64)) {
        self.report.blocks += 1;
        if found != expected {
            let shard: ShardId = self.blocks.plan.shards[owned.index()].shard;
            let path = self.blocks.disk.path().display();
            self.report.damaged.push(format!(
                "{path} ({what} of {shard}, block {block} of it: CRC-64 {found:016x}, not {expected:016x})"
            ));
        }
    }
}
