//! Writes a run's lasting results: checkpoints on the way and at the end, and the export.

use std::{collections::BTreeSet, path::PathBuf, time::Duration};

use anyhow::Context;
use longshore_proto::{Dtype, FaultKind, Version};
use longshore_worker::{
    error::Error,
    session::{Session, checkpoint_name},
};

use super::{
    Flags, Settings,
    report::{Kept, Report},
};
use crate::{access::Access, export, servers::Servers, sizes::human};

/// Writes checkpoints and the export when they are due, on rank 0.
pub(super) struct Keeper<'a> {
    settings: &'a Settings,
    servers: &'a [String],
    embedded: bool,
    /// The newest checkpoint of this run.
    last: Option<(String, Version)>,
    /// Number of checkpoints that failed since `last`.
    failures: u32,
    /// After a failed checkpoint: the step after which the next one is tried.
    retry_at: u64,
    said_not_shared: bool,
}

impl<'a> Keeper<'a> {
    pub(super) fn new(settings: &'a Settings, servers: &'a [String], embedded: bool) -> Keeper<'a> {
        Keeper { settings, servers, embedded, last: None, failures: 0, retry_at: 0, said_not_shared: false }
    }

    fn wants_checkpoints(&self) -> bool {
        self.settings.flags.checkpoint_every > 0
            || self.embedded && self.settings.flags.checkpoint_dir.is_some()
    }

    /// Checks that the checkpoints and the export could be written now. A run that has made steps goes on even if no
    /// checkpoint could be written.
    pub(super) fn check(&self, session: &Session, version: Version, report: &Report) -> anyhow::Result<()> {
        if let Some(dir) = &self.settings.flags.export {
            export::check_target(dir).context("the weights could not be exported at the end")?;
        }
        if !self.wants_checkpoints() {
            return Ok(());
        }
        match session.check_checkpoint() {
            Ok(()) => Ok(()),
            Err(error) if version > Version(0) && is_of_checkpoints(&error) => {
                report.note(&format!("no checkpoint could be written now, and training goes on: {error}"));
                Ok(())
            }
            Err(error) => Err(error).context("nothing was trained: no checkpoint could be written now"),
        }
    }

    /// Returns true if a checkpoint is due after this step.
    pub(super) fn is_due(&self, step: u64) -> bool {
        let every = self.settings.flags.checkpoint_every;
        let again = self.failures > 0 && step >= self.retry_at;
        every > 0 && step < self.settings.flags.steps && (step.is_multiple_of(every) || again)
    }

    /// Writes a checkpoint of `step`, the servers' current version. A failed checkpoint does not end the run.
    pub(super) fn checkpoint(
        &mut self,
        session: &Session,
        step: u64,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let name = checkpoint_name(step);
        let written = match session.checkpoint_numbered(&name) {
            Err(error) if is_of_checkpoints(&error) => {
                let wait = self.put_off(step);
                report.note(&format!(
                    "no checkpoint of step {step}: {error}. Training goes on, and it is tried again {wait}"
                ));
                return Ok(());
            }
            written => written?,
        };
        if written.name != name {
            report.note(&format!(
                "{name} is a checkpoint of another state already, from before the job went back"
            ));
        }
        if !written.shared && !std::mem::replace(&mut self.said_not_shared, true) {
            report.note(
                "the servers do not share a checkpoint folder: each keeps its own part. The same servers, in the same \
                 order, can restore it; for other servers bring the parts together in one folder first",
            );
        }
        report.checkpoint(&written.name, written.version.0);
        self.failures = 0;
        self.last = Some((written.name, written.version));
        Ok(())
    }

    /// Puts the next attempt off, by twice as many steps each time, at most until the next regular checkpoint.
    /// Returns the time of that attempt in words.
    fn put_off(&mut self, step: u64) -> String {
        let wait = 1 << self.failures.min(16);
        self.failures += 1;
        self.retry_at = step + wait;
        let next = self.settings.flags.checkpoint_every.max(1);
        let at = self.retry_at.min((step / next + 1) * next);
        if at < self.settings.flags.steps { format!("after step {at}") } else { "at the end".to_string() }
    }

    /// Writes the results at the end of training: the last version's checkpoint, and the export.
    pub(super) fn finish(
        &mut self,
        session: &Session,
        version: Version,
        report: &mut Report,
    ) -> anyhow::Result<Kept> {
        let is_last = |(_, kept): &(String, Version)| *kept == version;
        if self.wants_checkpoints() && !self.last.as_ref().is_some_and(is_last) {
            self.checkpoint(session, version.0, report)?;
        }
        let mut failure = None;
        if self.wants_checkpoints() && self.failures > 0 {
            failure = Some(anyhow::anyhow!(
                "training is done, and version {} is in no checkpoint: see the reason above{}",
                version.0,
                if self.is_gone_with_us() {
                    ""
                } else {
                    ". It is on the servers: make room, then `longshore checkpoint`"
                }
            ));
        }
        let mut lines = Vec::new();
        let mut exported = None;
        if let Some(dir) = &self.settings.flags.export {
            match self.export(dir.clone()) {
                Ok(line) => {
                    lines.push(line);
                    exported = Some(dir.clone());
                }
                Err(error) => failure = Some(error),
            }
        }
        let checkpoint = self.last.as_ref().map(|(name, _)| name.clone());
        lines.extend(checkpoint.as_ref().map(|name| self.checkpoint_line(name)));
        let gone = self.is_gone_with_us() && exported.is_none() && checkpoint.is_none();
        lines.push(self.state_line(session, gone, version));
        Ok(Kept { export: exported, checkpoint, lines, gone, failure })
    }

    fn export(&self, dir: PathBuf) -> anyhow::Result<String> {
        let settings = export::Settings {
            job: self.settings.job.to_string(),
            out: dir,
            dtype: Some(self.settings.flags.export_dtype.unwrap_or(Dtype::Bf16)),
            max_file_bytes: export::MAX_FILE_BYTES,
            deadline: Duration::from_secs(self.settings.flags.deadline_s),
            replace: true,
            shown: self.settings.out,
        };
        let access = if self.embedded { Access::default() } else { self.settings.flags.access.clone() };
        // The job may have left servers that the flag names, and be on other servers.
        let servers =
            Servers::reach(self.servers, &access).and_then(|(of, _)| of.with_members(&settings.job, &access));
        let exported = servers.and_then(|servers| export::run(&servers, &settings)).with_context(|| {
            format!("training is done, and its weights were not exported to {}", settings.out.display())
        })?;
        let (bytes, dtype) = (human(exported.bytes), exported.dtype);
        Ok(format!("weights           {} ({bytes} as {dtype})", settings.out.display()))
    }

    fn checkpoint_line(&self, name: &str) -> String {
        match &self.settings.flags.checkpoint_dir {
            Some(dir) if self.embedded => {
                let folder = dir.join(self.settings.job.as_str()).join(name);
                let flag = self.resume_flag(name);
                format!("checkpoint        {}: {flag} and more --steps go on from it", folder.display())
            }
            _ => format!("checkpoint        {name}, in the servers' checkpoint folder"),
        }
    }

    fn is_gone_with_us(&self) -> bool {
        ends_with_us(self.settings, self.embedded)
    }

    /// Returns the flag with which the same command continues from a checkpoint. A checkpoint that the command
    /// names wins over the newest one.
    fn resume_flag(&self, name: &str) -> String {
        match self.settings.flags.resume_from.as_ref().filter(|old| *old != name) {
            Some(old) => format!("--resume-from {name} instead of {old}"),
            None => "--resume".to_string(),
        }
    }

    /// Returns the message of a stopped run: its state, and how to continue.
    pub(super) fn way_on(&self, session: &Session, version: Version) -> String {
        let at = format!("after step {} of {}", version.0, self.settings.flags.steps);
        match &self.last {
            _ if !self.embedded => {
                format!("{at}: run the same command again{} to go on", moved_to(session, self.servers))
            }
            _ if !self.is_gone_with_us() => format!("{at}: run the same command again to go on"),
            Some((name, _)) => {
                let flag = self.resume_flag(name);
                format!("{at}: run the same command with {flag} to go on from checkpoint {name}")
            }
            None => format!(
                "{at}, and its embedded server kept the state in memory: it ends with this. With --checkpoint-dir DIR the same command \
                 leaves a checkpoint to go on from"
            ),
        }
    }

    fn state_line(&self, session: &Session, gone: bool, version: Version) -> String {
        let Flags { job, state_dir, shm_dir, tier, .. } = &self.settings.flags;
        let label = "state            ";
        if !self.embedded {
            let servers = session.servers().join(",");
            return format!(
                "{label} job {job} at version {} stays on its servers: `longshore export --servers {servers} --job={job} \
                 --out DIR` writes its weights",
                version.0
            );
        }
        if tier.properties().survives_restart() {
            let folders: Vec<_> =
                state_dir.iter().chain(shm_dir).map(|dir| dir.display().to_string()).collect();
            return format!(
                "{label} in {}: the same command with more --steps goes on from version {}",
                folders.join(","),
                version.0
            );
        }
        if gone {
            return format!(
                "{label} gone: the embedded server kept it in memory and ends now, trained weights included. Next time say \
                 --export DIR to write the weights, or --checkpoint-dir DIR to go on later"
            );
        }
        format!("{label} in memory of the embedded server, which ends now: what is named above stays")
    }
}

/// Names the job's present servers, if they differ from the servers of this run's flag. A command with the old flag
/// might open the job anew.
fn moved_to(session: &Session, named: &[String]) -> String {
    let present = session.servers();
    let is_same = present.iter().collect::<BTreeSet<_>>() == named.iter().collect();
    if is_same { String::new() } else { format!(" with --servers {}", present.join(",")) }
}

/// Returns true if the state ends with an embedded server that keeps it in memory.
fn ends_with_us(settings: &Settings, embedded: bool) -> bool {
    embedded && !settings.flags.tier.properties().survives_restart()
}

/// Returns the message of a run that a second signal ends at once: its state, and how to continue.
pub(super) fn cut_off(settings: &Settings, embedded: bool) -> String {
    if !embedded {
        return "at once: the servers hold the job at its last decided step, and the same command goes on from there"
            .to_string();
    }
    if !ends_with_us(settings, embedded) {
        return "at once: the job is in its state folder, and the same command goes on from there"
            .to_string();
    }
    let gone = "at once, and its embedded server kept the state in memory: it ends with this";
    let flag = match (&settings.flags.checkpoint_dir, &settings.flags.resume_from) {
        (None, _) => {
            return format!(
                "{gone}. With --checkpoint-dir DIR and --checkpoint-every STEPS the same command leaves checkpoints to go on from"
            );
        }
        (Some(_), Some(old)) => format!("--resume instead of --resume-from {old}"),
        (Some(_), None) => "--resume".to_string(),
    };
    format!("{gone}. If a checkpoint was written, the same command with {flag} goes on from the newest one")
}

/// Returns true if only a checkpoint failed. After a dead server or a failed job the next step fails too, with a
/// better error.
fn is_of_checkpoints(error: &Error) -> bool {
    match error {
        Error::Call(failed) => {
            matches!(failed.call, "Checkpoint" | "SealCheckpoint")
                && failed.fault.kind != FaultKind::Unavailable
        }
        Error::TimedOut(_) => true,
        _ => false,
    }
}
