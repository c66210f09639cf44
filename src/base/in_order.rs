//! Results of several threads, in the order of what they were made of: of several errors it is the first one, whoever was faster.

use rayon::iter::ParallelIterator;

/// Collects results as a sequential iterator does. Rayon's own `collect` into a `Result` gives the error of any thread.
pub trait InOrder<T, E> {
    /// All values, or the first error. The others are made all the same.
    ///
    /// # Errors
    /// That of the first item that has one.
    fn in_order<C: FromIterator<T>>(self) -> Result<C, E>;
}

impl<T: Send, E: Send, I: ParallelIterator<Item = Result<T, E>>> InOrder<T, E> for I {
    fn in_order<C: FromIterator<T>>(self) -> Result<C, E> {
        self.collect::<Vec<Result<T, E>>>().into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use rayon::prelude::*;

    use super::*;

    #[test]
    fn the_first_error_wins_however_late_it_comes() -> Result<(), rayon::ThreadPoolBuildError> {
        let late = |&item: &u64| {
            thread::sleep(Duration::from_millis(if item == 1 { 30 } else { 0 }));
            if item == 0 { Ok(item) } else { Err(item) }
        };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build()?;
        pool.install(|| {
            assert_eq!([0, 1, 2, 3].par_iter().map(late).in_order::<Vec<u64>>(), Err(1));
            assert_eq!([0, 0].par_iter().map(late).in_order::<Vec<u64>>(), Ok(vec![0, 0]));
        });
        Ok(())
    }
}
