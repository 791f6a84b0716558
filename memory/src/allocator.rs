//! Number of arenas in which the process's own allocator shares out its memory among threads.

/// Limits glibc to two arenas. By default it makes eight a core, each of which keeps the memory that its
/// threads have freed. A server's calls move from thread to thread, so it kept 32 to 98 MB of messages,
/// differently from run to run. With two arenas it kept 28 to 32 MB, and steps took as long. Other allocators
/// are left as they are.
///
/// Call this before the process has other threads, whose arenas would stay.
pub fn few_arenas() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const ARENAS: libc::c_int = 2;
        // SAFETY: mallopt takes two numbers, may be called from any thread, and refuses what it does not know.
        let taken = unsafe { libc::mallopt(libc::M_ARENA_MAX, ARENAS) };
        if taken == 0 {
            tracing::debug!("the allocator keeps its own number of arenas");
        }
    }
}
