/* Lets pyuv 1.4.0, its last release, compile on Python >= 3.10: CFLAGS="-include tools/pyuv_compat.h" pip install pyuv.
 *
 * Its source still speaks of three things that CPython has since changed; they are given back here, after Python.h.
 */
#ifndef DISTTRAIN_PYUV_COMPAT_H
#define DISTTRAIN_PYUV_COMPAT_H

/* pyuv.h says this too, but comes too late: this file includes Python.h first. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* 3.10 made Py_REFCNT a function, and `Py_REFCNT(self) = refcnt` needs an lvalue. Py_SET_REFCNT would do the same. */
#undef Py_REFCNT
#define Py_REFCNT(object) (((PyObject *)(object))->ob_refcnt)

/* Called once, as EncodeUTF8(AS_UNICODE(text), GET_SIZE(text), errors). 3.11 and 3.12 took these away; the text itself
 * is all that is needed today, so AS_UNICODE hands it on and the size goes unused. */
#undef PyUnicode_AS_UNICODE
#define PyUnicode_AS_UNICODE(text) (text)
#undef PyUnicode_EncodeUTF8
#define PyUnicode_EncodeUTF8(text, size, errors) PyUnicode_AsEncodedString((text), "utf-8", (errors))

#endif
