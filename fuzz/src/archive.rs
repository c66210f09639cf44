//! A zip archive of torch's around a pickle, with storages and checksums, so that mutations reach what the pickle says.

use std::sync::LazyLock;

/// Storages, by the keys 0, 1, 2, ...
const STORAGES: usize = 24;
/// Bytes of each.
const STORAGE: usize = 4096;

/// The entries and their rows of the directory.
#[derive(Clone, Default)]
struct Entries {
    bytes: Vec<u8>,
    directory: Vec<u8>,
    count: u16,
}

/// The same for every pickle.
static FIRST: LazyLock<Entries> = LazyLock::new(|| {
    let mut entries = Entries::default();
    for key in 0..STORAGES {
        // Small whole numbers as float32, finite and not all the same.
        let storage: Vec<u8> =
            (0..STORAGE / 4).flat_map(|at| ((at % 251) as f32).to_le_bytes()).collect();
        entries.add(&format!("archive/data/{key}"), &storage);
    }
    entries.add("archive/version", b"3\n");
    entries
});

/// The archive with this pickle.
pub(crate) fn around(pickle: &[u8]) -> Vec<u8> {
    let mut entries = FIRST.clone();
    entries.add("archive/data.pkl", pickle);
    let Entries { mut bytes, directory, count } = entries;
    let (start, len) = (long(bytes.len()), long(directory.len()));
    bytes.extend(directory);
    let count = count.to_le_bytes();
    bytes.extend([&b"PK\x05\x06\0\0\0\0"[..], &count, &count, &len, &start, &[0, 0]].concat());
    bytes
}

impl Entries {
    fn add(&mut self, name: &str, content: &[u8]) {
        let header = long(self.bytes.len());
        let mut common = vec![20, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        common.extend(checksum(content).to_le_bytes());
        common.extend([long(content.len()), long(content.len())].concat());
        common.extend([(name.len() as u16).to_le_bytes(), [0, 0]].concat());
        self.bytes.extend([b"PK\x03\x04", &*common, name.as_bytes(), content].concat());
        let row = [b"PK\x01\x02\x14\0", &*common, &[0; 10], &header, name.as_bytes()].concat();
        self.directory.extend(row);
        self.count += 1;
    }
}

fn long(number: usize) -> [u8; 4] {
    u32::try_from(number).expect("small inputs").to_le_bytes()
}

/// CRC-32 as zip has it, a table's step a byte.
fn checksum(bytes: &[u8]) -> u32 {
    static TABLE: LazyLock<[u32; 256]> = LazyLock::new(|| {
        std::array::from_fn(|byte| {
            (0..8).fold(byte as u32, |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
        })
    });
    !bytes.iter().fold(!0, |crc, byte| (crc >> 8) ^ TABLE[usize::from(crc as u8 ^ byte)])
}
