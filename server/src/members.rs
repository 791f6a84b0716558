//! Who may use the Unix socket. The file's mode says it too, and the kernel asks that first; this asks for each connection, and so
//! holds where the mode was loosened, and for processes that keep a group which was taken from their user.

use std::{fs, io};

use rustix::process::geteuid;

const GROUPS: &str = "/etc/group";
const USERS: &str = "/etc/passwd";

/// Root, the server's user, and a group's members.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Members {
    own: u32,
    group: Option<u32>,
}

impl Members {
    /// `group` is a name that /etc/group has, or a number.
    ///
    /// # Errors
    /// Where there is no such name.
    pub(crate) fn of(group: Option<&str>) -> io::Result<Members> {
        let number = |name: &str| match name.parse() {
            Ok(number) => Ok(number),
            Err(_) => number_of(&fs::read_to_string(GROUPS)?, name).ok_or_else(|| {
                let why =
                    format!("{GROUPS} has no group {name:?}; give the number of one that it does not list");
                io::Error::new(io::ErrorKind::NotFound, why)
            }),
        };
        Ok(Members { own: geteuid().as_raw(), group: group.map(number).transpose()? })
    }

    pub(crate) fn group(&self) -> Option<u32> {
        self.group
    }

    /// Whether a process of this user and group may connect. A process keeps groups that were taken from its user, so
    /// what is listed of the user counts.
    pub(crate) fn admit(&self, user: u32, group: u32) -> bool {
        let listed = |wanted| {
            let [groups, users] = [GROUPS, USERS].map(|path| fs::read_to_string(path).unwrap_or_default());
            lists(&groups, &users, wanted, user)
        };
        user == 0 || user == self.own || self.group.is_some_and(|wanted| wanted == group || listed(wanted))
    }
}

fn number_of(groups: &str, name: &str) -> Option<u32> {
    let group = groups.lines().find(|line| line.split(':').next() == Some(name))?;
    group.split(':').nth(2)?.parse().ok()
}

/// Whether the user is listed as one of the group, with a name of the user's.
fn lists(groups: &str, users: &str, group: u32, user: u32) -> bool {
    let has = |line: &&str, number: u32| line.split(':').nth(2) == Some(&number.to_string());
    let names = users.lines().filter(|line| has(line, user)).filter_map(|line| line.split(':').next());
    let members: Vec<&str> = groups
        .lines()
        .filter(|line| has(line, group))
        .flat_map(|line| line.split(':').nth(3).unwrap_or_default().split(','))
        .collect();
    names.into_iter().any(|name| !name.is_empty() && members.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUPS: &str = "root:x:0:\nship:x:500:ann,bob\ncrew:x:501:\nbroken\n";
    const USERS: &str =
        "root:x:0:0::/:/bin/sh\nann:x:1001:1001::/:/bin/sh\ncarl:x:1003:1003::/:/bin/sh\n:x:1004:1\n";

    #[test]
    fn a_user_is_a_member_as_the_files_have_it() {
        assert_eq!((number_of(GROUPS, "ship"), number_of(GROUPS, "broken")), (Some(500), None));
        assert_eq!(number_of(GROUPS, "sh"), None);
        assert!(lists(GROUPS, USERS, 500, 1001), "ann");
        for (group, user) in [(501, 1001), (500, 1003), (501, 1004), (500, 1002), (502, 1001)] {
            assert!(!lists(GROUPS, USERS, group, user), "{user} in {group}");
        }
    }

    #[test]
    fn root_the_own_user_and_the_group_are_admitted() {
        let (own, nobody) = (geteuid().as_raw(), 4_000_000_001);
        let members = Members::of(Some("4000000002")).unwrap();
        assert!(members.admit(0, 9) && members.admit(own, 9) && members.admit(nobody, 4_000_000_002));
        assert!(!members.admit(nobody, nobody));
        assert!(!Members::of(None).unwrap().admit(nobody, 4_000_000_002));
        let error = Members::of(Some("no such group")).unwrap_err().to_string();
        assert!(error.contains("no group \"no such group\""), "{error}");
    }
}
