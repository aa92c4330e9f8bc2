package tmc

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	tmcv1 "tmc/v1"
)

// queueReader receives from a queue of RabbitMQ, over one connection after the other.
type queueReader struct {
	receiver *receiver
	queue    string
	topic    string // one of those whose copies are in it
	screen   *screen
	workers  chan struct{} // a place for each copy that is handled
}

const setUpWithin = 15 * time.Second

// read receives over one connection. Returns: whether it began to, and why it ended.
func (q *queueReader) read(ctx context.Context) (got bool, err error) {
	connection, err := q.connect(ctx)
	if err != nil {
		return false, err
	}
	hangUp := func() { _ = connection.CloseDeadline(time.Now().Add(5 * time.Second)) }
	defer hangUp()
	late := time.AfterFunc(setUpWithin, hangUp) // a broker that is connected and does not answer
	defer late.Stop()
	stop := context.AfterFunc(ctx, hangUp)
	defer stop()
	channel, err := connection.Channel()
	if err != nil {
		return false, err
	}
	if err := channel.Qos(q.receiver.consumer.Workers, 0, false); err != nil {
		return false, err
	}
	closed := channel.NotifyClose(make(chan *amqp.Error, 1))
	copies, err := channel.Consume(q.queue, q.queue, false, false, false, false, nil)
	if err != nil {
		return false, err
	}
	late.Stop()
	if !stop() {
		return true, ctx.Err()
	}
	taken := sync.WaitGroup{}
	for {
		select {
		case d, open := <-copies:
			if !open {
				return true, whyEnded(closed)
			}
			q.receiver.busy.Add(1)
			taken.Go(func() {
				defer q.receiver.busy.Done()
				q.take(ctx, &d)
			})
		case <-ctx.Done():
			atMost := time.AfterFunc(q.receiver.consumer.Grace, hangUp)
			defer atMost.Stop()
			_ = channel.Cancel(q.queue, false) // no more of them
			q.receiver.await(&taken)           // what is handled is acked before the connection closes
			return true, ctx.Err()
		}
	}
}

// whyEnded returns why there are no more copies: the channel was closed, or the broker cancelled the consumer alone.
func whyEnded(closed chan *amqp.Error) error {
	select {
	case why := <-closed:
		if why != nil {
			return why
		}
		return amqp.ErrClosed
	default:
		return errors.New("tmc: the broker cancelled the consumer: its queue was deleted, or moves")
	}
}

// connect tries the nodes in turn.
func (q *queueReader) connect(ctx context.Context) (*amqp.Connection, error) {
	asked := time.Now()
	plan, err := q.receiver.describe(ctx) // brokers move
	if err != nil {
		return nil, err
	}
	broker, consumer := plan.Broker, q.receiver.consumer
	if broker == nil {
		return nil, fmt.Errorf("tmc: the center does not say where its broker is")
	}
	q.screen.learn(plan, asked)
	user, password := consumer.BrokerUser, consumer.BrokerPassword
	if user == "" {
		user, password = "guest", "guest"
	}
	config := amqp.Config{
		SASL: []amqp.Authentication{&amqp.PlainAuth{Username: user, Password: password}}, Vhost: broker.VirtualHost,
		Heartbeat: 10 * time.Second, Locale: "en_US", Properties: amqp.NewConnectionProperties(),
		Dial: func(network, address string) (net.Conn, error) { return dialed(ctx, network, address) },
	}
	config.Properties.SetClientConnectionName("tmc " + q.queue)
	scheme := "amqp://"
	if broker.Tls {
		scheme = "amqps://"
	}
	for _, address := range append([]string{net.JoinHostPort(broker.Host, strconv.Itoa(int(broker.Port)))}, broker.Others...) {
		var connection *amqp.Connection
		config.TLSClientConfig = consumer.BrokerTLS.Clone() // which gets the name of this node
		if connection, err = amqp.DialConfig(scheme+address, config); err == nil {
			return connection, nil
		}
	}
	return nil, err
}

// dialed connects, and gives the broker 5 s to begin to speak.
func dialed(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	connection, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return connection, connection.SetDeadline(time.Now().Add(5 * time.Second)) // heartbeats set it from then on
}

// take has a copy handled. It is acked at the broker whatever became of it: the center decides when it comes again.
func (q *queueReader) take(ctx context.Context, d *amqp.Delivery) {
	arrived := time.Now()
	m, signature := copyOf(d)
	switch q.screen.judge(ctx, m, signature, q.topic) {
	case genuine:
		select { // of an earlier connection, some may be handled still
		case q.workers <- struct{}{}:
			defer func() { <-q.workers }()
		case <-ctx.Done():
			return
		}
		m.Redelivered = m.Redelivered || time.Since(arrived) > askEvery // the broker may have given it to somebody else meanwhile
		q.receiver.handle(m)
	case stopped:
		return // it comes again
	}
	if q.receiver.ctx.Err() == nil { // else nobody knows whether the center has its answer
		_ = d.Ack(false) // what cannot be acked comes again, and its handler does not begin
	}
}

// copyOf reads a copy. What is missing in a forged one is empty, and so not what the center signed.
func copyOf(d *amqp.Delivery) (*Copy, string) {
	m := &Copy{
		MessageID: d.MessageId, Topic: d.Type, Producer: d.AppId, Body: d.Body, ContentType: d.ContentType,
		Headers: map[string]string{}, Redelivered: d.Redelivered,
	}
	signature := ""
	for name, value := range d.Headers {
		text, lower := fmt.Sprint(value), strings.ToLower(name)
		switch {
		case name == "tmc-key":
			m.Key = text
		case name == "tmc-subscriber":
			m.Subscriber = text
		case name == "tmc-signature":
			signature = text
		case name == "tmc-attempt":
			number, _ := strconv.ParseInt(text, 10, 32)
			m.Attempt = int32(number)
		case name == "tmc-interval-ms":
			number, _ := strconv.ParseInt(text, 10, 48)
			m.Interval = time.Duration(number) * time.Millisecond
		case strings.HasPrefix(name, "tmc-user-"):
			m.Headers[strings.TrimPrefix(name, "tmc-user-")] = text
		case !strings.HasPrefix(lower, "x-") && lower != "cc" && lower != "bcc":
			m.Headers[name] = text
		}
	}
	return m, signature
}

// signedBy returns the signature that a key gives a copy: docs/signatures.md.
func signedBy(key []byte, m *Copy) string {
	digest, id, mac := sha256.Sum256(m.Body), sha256.Sum256(key), hmac.New(sha256.New, key)
	parts := []string{
		m.Topic, m.Producer, m.Subscriber, strconv.FormatInt(m.Interval.Milliseconds(), 10), m.ContentType, m.MessageID,
		strconv.Itoa(int(m.Attempt)), m.Key, string(digest[:]),
	}
	names := make([]string, 0, len(m.Headers))
	for name := range m.Headers {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		parts = append(parts, name, m.Headers[name])
	}
	for _, part := range parts {
		fmt.Fprintf(mac, "%d:%s,", len(part), part)
	}
	return "v1=" + hex.EncodeToString(id[:4]) + ":" + hex.EncodeToString(mac.Sum(nil))
}

type judgment int

const (
	genuine judgment = iota
	forged
	stopped // before it was known
)

const (
	askEvery    = 500 * time.Millisecond
	reportEvery = time.Second
	unsignedFor = 10 * time.Second
)

var messageID = regexp.MustCompile(`^[0-9]{1,10}-[0-9]{1,10}-[0-9]{1,2}-[0-9]{1,20}$`)

// screen lets only copies pass that the center signed, and reports the others.
type screen struct {
	receiver *receiver
	asking   chan struct{} // a place for the one that asks the center

	lock     sync.Mutex
	keys     map[string][][]byte // by topic; none: its copies are not signed
	learned  time.Time
	forged   map[string]*tmcv1.ReportForgedCopiesRequest // by topic, not reported yet
	reported bool                                        // somebody is about to
}

func newScreen(r *receiver) *screen {
	return &screen{receiver: r, asking: make(chan struct{}, 1), forged: map[string]*tmcv1.ReportForgedCopiesRequest{}}
}

// learn takes over the keys that the center gave to a call made at this time.
func (s *screen) learn(plan *tmcv1.DescribeSubscriptionsResponse, asked time.Time) {
	keys := map[string][][]byte{}
	for _, subscription := range plan.Subscriptions {
		keys[subscription.Topic] = [][]byte{}
		for _, text := range subscription.DeliveryKeys {
			key, err := hex.DecodeString(text)
			if err != nil || len(key) == 0 {
				key = NewAttempt() // a key of a kind that we do not know: no copy is signed with this one
			}
			keys[subscription.Topic] = append(keys[subscription.Topic], key)
		}
	}
	s.lock.Lock()
	defer s.lock.Unlock()
	s.keys, s.learned = keys, asked
}

// judge waits for the center's answer if a copy names a key or a topic that is not known yet.
func (s *screen) judge(ctx context.Context, m *Copy, signature string, topic string) judgment {
	if messageID.MatchString(m.MessageID) {
		arrived := time.Now()
		right, known := s.isGenuine(m, signature)
		if !known && !s.learnAgain(ctx, arrived) {
			return stopped
		}
		if !known {
			right, _ = s.isGenuine(m, signature)
		}
		if right {
			return genuine
		}
	}
	s.report(m, topic)
	return forged
}

// learnAgain asks the center for its keys, unless somebody has since then. Returns false: ctx ended before.
func (s *screen) learnAgain(ctx context.Context, since time.Time) bool {
	select {
	case s.asking <- struct{}{}:
	case <-ctx.Done():
		return false
	}
	defer func() { <-s.asking }()
	for last := s.lastLearned(); !last.After(since); last = s.lastLearned() {
		if !sleep(ctx, time.Until(last.Add(askEvery))) {
			return false
		}
		asked := time.Now()
		plan, err := s.receiver.describe(ctx)
		if err == nil {
			s.learn(plan, asked)
		} else if !sleep(ctx, longestPause) {
			return false
		}
	}
	return true
}

func (s *screen) lastLearned() time.Time {
	s.lock.Lock()
	defer s.lock.Unlock()
	return s.learned
}

// isGenuine returns whether the center signed a copy, and whether that is certain with the keys that are known.
func (s *screen) isGenuine(m *Copy, signature string) (right, known bool) {
	s.lock.Lock()
	defer s.lock.Unlock()
	keys, found := s.keys[m.Topic]
	if found && len(keys) == 0 {
		return true, signature == "" || time.Since(s.learned) < unsignedFor // else its copies may be signed by now
	}
	for _, key := range keys {
		want := signedBy(key, m)
		if hmac.Equal([]byte(want), []byte(signature)) {
			return true, true
		}
		if id, _, _ := strings.Cut(want, ":"); strings.HasPrefix(signature, id+":") {
			return false, true
		}
	}
	return false, found && signature == ""
}

// report tells the center of refused copies, once a second.
func (s *screen) report(m *Copy, topic string) {
	s.lock.Lock()
	defer s.lock.Unlock()
	if _, found := s.keys[m.Topic]; found {
		topic = m.Topic
	}
	claimed := m.MessageID
	if !messageID.MatchString(claimed) {
		claimed = ""
	}
	s.add(&tmcv1.ReportForgedCopiesRequest{Topic: topic, MessageId: claimed, Count: 1})
}

// add notes a report for the next call. The lock is held.
func (s *screen) add(report *tmcv1.ReportForgedCopiesRequest) {
	if found := s.forged[report.Topic]; found != nil {
		found.Count += report.Count
		return
	}
	s.forged[report.Topic] = report
	if !s.reported {
		s.reported = true
		time.AfterFunc(reportEvery, s.send)
	}
}

func (s *screen) send() {
	s.lock.Lock()
	reports := s.forged
	s.forged, s.reported = map[string]*tmcv1.ReportForgedCopiesRequest{}, false
	s.lock.Unlock()
	for _, report := range reports {
		s.receiver.client.log.Error("tmc: copies that the center did not sign are dropped", "topic", report.Topic, "count", report.Count)
		ctx, cancel := context.WithTimeout(s.receiver.client.calling(s.receiver.ctx), callTimeout)
		_, err := s.receiver.client.consumed.ReportForgedCopies(ctx, report)
		cancel()
		if found, isOurs := refused(err).(*Error); isOurs && found.isPassing() && s.receiver.ctx.Err() == nil {
			s.lock.Lock()
			s.add(report)
			s.lock.Unlock()
		} else if err != nil {
			s.receiver.client.log.Warn("tmc: they could not be reported", "error", err)
		}
	}
}
