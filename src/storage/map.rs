//! Parts of files as they lie in the page cache, seen through memory maps instead of copied.
//!
//! A read first waits until the memory has delivered the bytes and the kernel has copied them, and then the comparison
//! begins; through a map the processor fetches the next bytes while it computes on these. That pays where the page
//! cache holds a file in large folios (ext4 and XFS of recent Linux, files that were read from a disk front to back):
//! there one entry maps 2 MiB. With pages of 4 KiB, making the entries takes longer than copying the bytes.
//!
//! Measured on Zen 5 with Linux 6.18 and two threads, 2 x 0.9 GB, time of the whole command with maps to that with reads:
//! bfloat16 0.64 to 0.81, float32 0.72 to 0.82 in large folios. With maps whatever the folios, 1.2 to 1.4
//! in small ones. Entries of 8 MiB take 10 us in folios of 2 MiB, 110 in those of 64 KiB and more, 2,000 in small ones; a
//! read takes 400. So a map is made only of bytes that are in the cache already, its entries are made step by step, and
//! where that takes long it is given up.
//!
//! What would be a signal, a file cut off while it is looked at or a disk that fails, becomes an error: a page of zeros
//! takes the place of what is gone, and [`Map::is_intact`] says so.

#![expect(
    unsafe_code,
    reason = "one of the two rooms for it: maps, and a signal that becomes an error"
)]

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::io::ReadWriteFlags;

/// Bytes that one entry maps at best; maps begin and end on multiples of it.
const HUGE: u64 = 2 << 20;

/// Bytes whose entries are made at a time.
const STEP: usize = 1 << 20;

/// Time that they may take: half that of a read, and twice that of folios of 64 KiB.
pub(super) const PATIENCE: Duration = Duration::from_micros(25);

/// Time that calls of the system take beside it.
const CALLS: Duration = Duration::from_micros(10);

/// A part of a file in memory. It may change while it is looked at, if another program writes to the file.
#[derive(Debug)]
pub struct Map {
    /// The first of the wanted bytes.
    address: *const u8,
    len: usize,
    place: MappedRange,
}

impl Map {
    /// The `len` bytes from `offset` on of a file of `file_len` bytes; `None` where they cannot be mapped, would have to
    /// be fetched from a disk, or where that takes more than `patience` for a mebibyte.
    pub(super) fn of(
        file: &File,
        offset: u64,
        len: usize,
        file_len: u64,
        patience: Duration,
    ) -> Option<Self> {
        let end = offset.checked_add(u64::try_from(len).ok()?)?;
        if len == 0 || end > file_len || !is_cached(file, end - 1) {
            return None;
        }
        let first = offset / HUGE * HUGE;
        let all =
            usize::try_from(end.checked_next_multiple_of(HUGE)?.min(file_len) - first).ok()?;
        let skip = usize::try_from(offset - first).ok()?;
        let place = MappedRange::take(file, first, all)?;
        let address = place.start() as *const u8;
        // SAFETY: `skip + len <= all`, as `end` is no more than either end that `all` was computed from.
        let address = unsafe { address.add(skip) };
        let map = Self { address, len, place };
        map.is_populated(patience).then_some(map)
    }

    /// Makes all entries, unless that turns out to take long. An error of the disk or an end of the file is an error here
    /// and no signal.
    fn is_populated(&self, patience: Duration) -> bool {
        let page = page_size();
        let first = self.address as usize / page * page;
        let end = self.address as usize + self.len;
        let start = thread_time();
        (first..end).step_by(STEP).all(|at| {
            let len = STEP.min(end - at);
            // SAFETY: the pages belong to the map, which is only read.
            let done = unsafe { libc::madvise(at as *mut c_void, len, libc::MADV_POPULATE_READ) };
            let steps = u32::try_from((at - first) / STEP + 1).unwrap_or(u32::MAX);
            let most = patience.saturating_mul(steps).saturating_add(CALLS);
            done == 0 && thread_time().saturating_sub(start) <= most
        })
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: they are mapped as long as `self` lives, and readable: what the file no longer has is replaced by zeros
        // (`on_bus_error`). That nobody else changes them is not ours to promise. Whoever takes these bytes does arithmetic on them, or
        // checks what is computed from them, so that a change is a wrong result, which `FileSet::changed` then reports.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }

    /// True while all bytes that were looked at were those of the file.
    #[must_use]
    pub fn is_intact(&self) -> bool {
        !self.place.slot.is_lost.load(Ordering::Acquire)
    }
}

/// True where the page cache has the byte, which is taken for all before it: files are read from front to back.
fn is_cached(file: &File, offset: u64) -> bool {
    let mut byte = [0];
    let room = &mut [IoSliceMut::new(&mut byte)];
    // Not libc's: before glibc 2.26 there is none.
    matches!(rustix::io::preadv2(file, room, offset, ReadWriteFlags::NOWAIT), Ok(1))
}

/// The processor's time for this thread, so that other load on the machine makes no difference.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure lives until the call returns; nothing else could be wrong with it.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    let [seconds, nanoseconds] = [time.tv_sec, time.tv_nsec].map(|x| u64::try_from(x).unwrap_or(0));
    Duration::from_secs(seconds) + Duration::from_nanos(nanoseconds)
}

fn page_size() -> usize {
    // SAFETY: no arguments that could be wrong.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Addresses that are mapped, entered where the signal handler finds them.
#[derive(Debug)]
struct MappedRange {
    slot: &'static MapSlot,
}

#[derive(Debug)]
struct MapSlot {
    /// Counts the maps that it was filled in for, so that a reader of the other two knows them to be of one map.
    generation: AtomicUsize,
    /// 0 while the slot is free, 1 while it is being filled in.
    start: AtomicUsize,
    end: AtomicUsize,
    is_lost: AtomicBool,
}

/// As many maps as there may be at a time; beyond that, files are read.
static SLOTS: [MapSlot; 1024] = [const {
    MapSlot {
        generation: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        is_lost: AtomicBool::new(false),
    }
}; 1024];

impl MapSlot {
    /// Start and end of the map that the slot is of; `None` while there is none, or another one takes its place.
    fn range(&self) -> Option<(usize, usize)> {
        let generation = self.generation.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Acquire);
        let end = self.end.load(Ordering::Acquire);
        // Who has seen the end of a later map sees here that it is one.
        let is_one = self.generation.load(Ordering::Relaxed) == generation;
        (start > 1 && is_one).then_some((start, end))
    }
}

impl MappedRange {
    fn take(file: &File, offset: u64, len: usize) -> Option<Self> {
        if !handles_bus_errors() {
            return None;
        }
        let offset = libc::off_t::try_from(offset).ok()?;
        let slot = SLOTS.iter().find(|slot| {
            slot.start.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
        })?;
        // SAFETY: a new map, at an address that the kernel chooses.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                offset,
            )
        };
        if address == libc::MAP_FAILED {
            slot.start.store(0, Ordering::Release);
            return None;
        }
        slot.generation.fetch_add(1, Ordering::Release);
        slot.is_lost.store(false, Ordering::Relaxed);
        slot.end.store(address as usize + len, Ordering::Release);
        slot.start.store(address as usize, Ordering::Release);
        Some(Self { slot })
    }

    fn start(&self) -> usize {
        self.slot.start.load(Ordering::Relaxed)
    }
}

impl Drop for MappedRange {
    fn drop(&mut self) {
        let start = self.start();
        let len = self.slot.end.load(Ordering::Relaxed) - start;
        // Another map may have these addresses at once.
        self.slot.start.store(1, Ordering::Release);
        // SAFETY: mapped by `take`, and `Map` hands out its bytes only for as long as it lives.
        unsafe { libc::munmap(start as *mut c_void, len) };
        self.slot.start.store(0, Ordering::Release);
    }
}

/// The action on a bus error that was installed before.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs [`on_bus_error`], once. Returns whether it is.
fn handles_bus_errors() -> bool {
    static IS_INSTALLED: OnceLock<bool> = OnceLock::new();
    *IS_INSTALLED.get_or_init(|| {
        // SAFETY: all zeros are a value of these structures of integers and an optional pointer.
        let (mut action, mut previous): (libc::sigaction, libc::sigaction) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_bus_error;
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler is one of three arguments, as SA_SIGINFO says, and calls nothing that a handler may not.
        let done = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, &raw mut previous) };
        done == 0 && PREVIOUS.set(previous).is_ok()
    })
}

/// Puts zeros in the place of a map of ours that has lost its bytes; what else there is to a bus error goes the way it went before.
extern "C" fn on_bus_error(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel hands over a valid structure, and an address in it for this signal; errno is the thread's own.
    let (address, errno) = unsafe { ((*info).si_addr() as usize, libc::__errno_location()) };
    for slot in &SLOTS {
        if let Some((start, end)) = slot.range()
            && (start..end).contains(&address)
        {
            let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: these addresses are those of one map (`MapSlot::range`), which is not taken away meanwhile: the thread that
            // was stopped here is looking at it. And errno is put back.
            let replaced = unsafe {
                let before = *errno;
                let all =
                    libc::mmap(start as *mut c_void, end - start, libc::PROT_READ, flags, -1, 0);
                *errno = before;
                all != libc::MAP_FAILED
            };
            if replaced {
                slot.is_lost.store(true, Ordering::Release);
                return;
            }
        }
    }
    // The instruction is tried again, and fails again.
    // SAFETY: what the system gave as the former action, or else all zeros, which is the default one.
    unsafe {
        let default: libc::sigaction = std::mem::zeroed();
        let previous = PREVIOUS.get().unwrap_or(&default);
        libc::sigaction(libc::SIGBUS, previous, ptr::null_mut());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;

    use tempfile::NamedTempFile;

    use super::*;

    fn file(bytes: &[u8]) -> NamedTempFile {
        let mut file = NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|i| ((i * 7 + i / 251) % 256).try_into().unwrap()).collect()
    }

    /// The map that a patient user gets; `None` if the system here maps nothing that it has in its cache.
    fn mapped(file: &NamedTempFile, offset: u64, len: usize, file_len: u64) -> Option<Map> {
        Map::of(file.as_file(), offset, len, file_len, Duration::MAX)
    }

    fn system_maps() -> bool {
        mapped(&file(b"some"), 0, 4, 4).is_some()
    }

    #[test]
    fn any_part_of_a_file_is_seen_as_it_is() {
        let bytes = pattern(5_000_123);
        let file = file(&bytes);
        for (offset, len) in [(0, 1), (0, 5_000_123), (4095, 2), (2_097_151, 2), (5_000_122, 1)] {
            let Some(map) = mapped(&file, offset as u64, len, 5_000_123) else {
                assert!(!system_maps());
                continue;
            };
            assert!(map.bytes() == &bytes[offset..offset + len], "{offset}, {len}");
            assert!(map.is_intact());
        }
    }

    #[test]
    fn what_a_file_does_not_have_is_not_mapped() {
        let file = file(&pattern(10_000));
        assert!(mapped(&file, 9_000, 1_001, 10_000).is_none());
        assert!(mapped(&file, u64::MAX, 1, 10_000).is_none());
        assert!(mapped(&file, 0, 0, 10_000).is_none());
        // It was longer once.
        assert!(mapped(&file, 0, 20_000, 20_000).is_none());
    }

    #[test]
    fn a_file_cut_off_while_it_is_mapped_is_noticed_and_ends_nothing() {
        let bytes = pattern(3 << 20);
        let (cut, whole) = (file(&bytes), file(&bytes));
        let (Some(map), Some(other)) =
            (mapped(&cut, 0, 3 << 20, 3 << 20), mapped(&whole, 0, 3 << 20, 3 << 20))
        else {
            return assert!(!system_maps());
        };
        assert!(map.bytes() == bytes);
        cut.as_file().set_len(4096).unwrap();
        assert_eq!(map.bytes().iter().skip(4096).map(|&byte| u64::from(byte)).sum::<u64>(), 0);
        assert!(!map.is_intact());
        assert!(other.bytes() == bytes && other.is_intact());
        drop(map);
        let again = mapped(&whole, 0, 3 << 20, 3 << 20).unwrap();
        assert!(again.bytes() == bytes && again.is_intact());
    }
}
