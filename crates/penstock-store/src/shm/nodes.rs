//! Which NUMA nodes a segment's memory comes from. Engines of all nodes use it, so it comes from all
//! nodes in turn.
#![allow(
    unsafe_code,
    reason = "no safe crate sets the memory policy of a mapping"
)]

use std::fs::{self, File};
use std::io;

use memmap2::{MmapOptions, MmapRaw};

const ONLINE_NODES: &str = "/sys/devices/system/node/online";
/// `MPOL_INTERLEAVE`: pages come from the nodes in turn.
const INTERLEAVE: i32 = 3;

/// Has pages of a file of `bytes` bytes, which has none yet, come from all nodes of the machine in
/// turn. If this fails, they come from wherever the process runs that allocates them.
pub(super) fn spread(file: &File, bytes: u64) {
    let nodes = fs::read_to_string(ONLINE_NODES).map_or_else(|_| Vec::new(), |list| listed(&list));
    let (true, Ok(len)) = (nodes.len() > 1, usize::try_from(bytes)) else {
        return;
    };
    if let Ok(memory) = MmapOptions::new().len(len).map_raw(file) {
        let _ = interleave(&memory, &nodes);
    }
}

/// Has pages of the file behind a shared mapping come from these nodes in turn. This holds for all
/// processes that map the file.
fn interleave(memory: &MmapRaw, nodes: &[u32]) -> io::Result<()> {
    let words = nodes.iter().max().map_or(1, |most| *most as usize / 64 + 1);
    let mut mask = vec![0_u64; words];
    for node in nodes {
        mask[*node as usize / 64] |= 1 << (node % 64);
    }
    // SAFETY: the range is that of a mapping, and the mask has as many bits as it says, less the one
    // that the call takes off. The call changes where pages come from, not what is in them.
    let refused = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            memory.as_mut_ptr(),
            memory.len(),
            INTERLEAVE,
            mask.as_ptr(),
            words * 64 + 1,
            0,
        )
    };
    if refused == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The numbers in a list as the kernel writes it, such as `0-1,4`. No numbers if it is no such list.
fn listed(list: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    let ranges: Option<Vec<_>> = list.trim().split(',').map(range).collect();
    ranges.into_iter().flatten().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_lists_are_read() {
        assert_eq!(listed("0\n"), [0]);
        assert_eq!(listed("0-1,4\n"), [0, 1, 4]);
        assert_eq!(listed("2,64-65\n"), [2, 64, 65]);
        assert!(listed("").is_empty());
        assert!(listed("all").is_empty());
    }

    /// Pages come from the nodes in turn, as far as a machine with one node can tell.
    #[test]
    fn pages_come_from_the_nodes_in_turn() {
        let maps = "/proc/self/numa_maps";
        if !fs::exists(maps).unwrap() {
            return;
        }
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let memory = MmapOptions::new()
            .len(1 << 20)
            .map_raw(file.as_file())
            .unwrap();
        interleave(&memory, &[0]).unwrap();
        let maps = fs::read_to_string(maps).unwrap();
        let start = format!("{:08x} ", memory.as_ptr() as usize);
        let line = maps.lines().find(|line| line.starts_with(&start)).unwrap();
        assert!(line.contains(" interleave"), "{line}");
        // A node that is not there.
        assert!(interleave(&memory, &[1000]).is_err());
    }
}
