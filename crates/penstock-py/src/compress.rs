//! Lossless compression for Python: buffers in, buffers out, without the GIL.

use penstock_value::compare::Numbers;
use penstock_value::compress::{self, Element, Speed};
use pyo3::prelude::*;

use crate::buffer::{Part, Pinned, check_apart};
use crate::errors::{config_error, raised};

/// The coder of one element type, with the fastest instructions that this CPU has.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Coder {
    element: Element,
    speed: Speed,
}

/// Two buffers that share no byte: one to read, one to write to.
fn pinned(from: &Bound<'_, PyAny>, into: &Bound<'_, PyAny>) -> PyResult<[Part; 2]> {
    let parts = [
        Part::Own(Pinned::of(from, false)?),
        Part::Own(Pinned::of(into, true)?),
    ];
    check_apart(from.py(), parts.iter())?;
    Ok(parts)
}

/// The element type of this name.
pub(crate) fn element_named(py: Python<'_>, name: &str) -> PyResult<Element> {
    Element::named(name).ok_or_else(|| {
        let names = Element::ALL.map(Element::name).join(", ");
        config_error(py, format!("no coder for {name:?}; there are {names}"))
    })
}

/// The type of numbers of this name.
pub(crate) fn numbers_named(py: Python<'_>, name: &str) -> PyResult<Numbers> {
    Numbers::named(name).ok_or_else(|| {
        let names = Numbers::ALL.map(Numbers::name).join(", ");
        config_error(
            py,
            format!("{name:?} are no known numbers; there are {names}"),
        )
    })
}

#[pymethods]
impl Coder {
    /// Names of the element types that have a coder.
    #[classattr]
    fn elements() -> Vec<&'static str> {
        Element::ALL.map(Element::name).to_vec()
    }

    /// With `baseline`, the instructions are those that every CPU of the architecture has.
    #[new]
    #[pyo3(signature = (element, *, baseline = false))]
    fn new(py: Python<'_>, element: &str, baseline: bool) -> PyResult<Self> {
        let element = element_named(py, element)?;
        let speed = if baseline {
            Speed::BASELINE
        } else {
            Speed::best()
        };
        Ok(Self { element, speed })
    }

    /// Name of the set of instructions.
    #[getter]
    fn speed(&self) -> &'static str {
        self.speed.name()
    }

    /// Encodes a payload into the beginning of `into`. Returns the bytes of the code, or None if it
    /// is not smaller than the payload or has no room.
    #[allow(unsafe_code)]
    fn encode(
        &self,
        payload: &Bound<'_, PyAny>,
        into: &Bound<'_, PyAny>,
    ) -> PyResult<Option<usize>> {
        let [payload_part, into_part] = pinned(payload, into)?;
        Ok(payload.py().detach(|| {
            let from = payload_part.pinned().bytes();
            // SAFETY: this is the only slice of `into`, which shares no byte with the payload.
            let into = unsafe { into_part.pinned().bytes_mut() };
            compress::encode_at(self.speed, self.element, from, into)
        }))
    }

    /// Decodes a payload, which fills `into`. Raises `Rejected` if `coded` is no code of it.
    #[allow(unsafe_code)]
    fn decode(&self, coded: &Bound<'_, PyAny>, into: &Bound<'_, PyAny>) -> PyResult<()> {
        let [coded_part, into_part] = pinned(coded, into)?;
        let decoded = coded.py().detach(|| {
            let from = coded_part.pinned().bytes();
            // SAFETY: this is the only slice of `into`, which shares no byte with the code.
            let into = unsafe { into_part.pinned().bytes_mut() };
            compress::decode_at(self.speed, self.element, from, into)
        });
        decoded.map_err(|damaged| raised::Rejected::new_err((damaged.to_string(), "code")))
    }
}
