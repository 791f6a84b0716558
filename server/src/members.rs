//! Users who may connect to the Unix socket. The kernel first checks the file's mode; this check runs for each
//! connection. The check also holds if the mode was loosened, and for processes that keep a group taken from their
//! user.

use std::{fs, io};

use rustix::process::geteuid;

const GROUPS: &str = "/etc/group";
const USERS: &str = "/etc/passwd";

/// Root, the server's user, and the members of one group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Members {
    own: u32,
    group: Option<u32>,
}

impl Members {
    /// Resolves the group. `group` is a name in /etc/group, or a number.
    ///
    /// # Errors
    /// If no such name exists.
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

    pub(crate) fn own(&self) -> u32 {
        self.own
    }

    pub(crate) fn group(&self) -> Option<u32> {
        self.group
    }

    /// Returns whether a process of this user and group may connect. The user's entry in the files decides, since a
    /// process keeps groups taken from its user. The process's own group decides for users that the files do not list.
    pub(crate) fn admit(&self, user: u32, group: u32) -> bool {
        let is_member = |wanted| {
            let [groups, users] = [GROUPS, USERS].map(|path| fs::read_to_string(path).unwrap_or_default());
            is_member(&groups, &users, wanted, user).unwrap_or(wanted == group)
        };
        user == 0 || user == self.own || self.group.is_some_and(is_member)
    }
}

fn number_of(groups: &str, name: &str) -> Option<u32> {
    let group = groups.lines().find(|line| line.split(':').next() == Some(name))?;
    group.split(':').nth(2)?.parse().ok()
}

/// Returns whether the user belongs to the group, by primary group or as a listed member. None if the files have no
/// such user.
fn is_member(groups: &str, users: &str, group: u32, user: u32) -> Option<bool> {
    let [group, user] = [group, user].map(|number| number.to_string());
    let number = |line: &str| line.split(':').nth(2).map(str::to_string);
    let members: Vec<&str> = groups
        .lines()
        .filter(|line| number(line).as_ref() == Some(&group))
        .flat_map(|line| line.split(':').nth(3).unwrap_or_default().split(','))
        .collect();
    let of_line = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next().unwrap_or_default();
        fields.nth(2) == Some(&group) || (!name.is_empty() && members.contains(&name))
    };
    users
        .lines()
        .filter(|line| number(line).as_ref() == Some(&user))
        .map(of_line)
        .reduce(|one, other| one || other)
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
        let is_member = |group, user| is_member(GROUPS, USERS, group, user);
        assert_eq!(is_member(500, 1001), Some(true), "ann is listed");
        assert_eq!(is_member(1003, 1003), Some(true), "it is carl's own");
        for (group, user) in [(501, 1001), (500, 1003), (501, 1004), (502, 1001)] {
            assert_eq!(is_member(group, user), Some(false), "{user} in {group}");
        }
        assert_eq!(is_member(500, 1002), None, "nobody knows bob's number");
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
